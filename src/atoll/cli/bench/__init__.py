"""`atoll bench`: what this machine, or this network, gives; measured beside its bound and beside what others use.

One process conducts; *members*, each a process of its own, do what they are ordered to (`member.py`) and say how long
it took. Orders go over a pipe to a member on this machine, over a TCP connection to one that joined from elsewhere.
"""
