"""Text in, batches of tokens out: sources, documents, tokenizers, the corpus, its slots, and a peer's reader.

    files  = expand_sources(["python-stdlib"])                       sources.py
    texts  = read_documents(files, ...)                              documents.py, rows.py, parquet.py
    corpus = tokenize(texts, tokenizer)                              corpus.py
    train, held_out = corpus.split(0.05)
    slots  = Slots.cut(train, 64, seed)                              slots.py
    reader = Reader(slots, static_assignment(slots, 0, 3), 128)      reader.py

All of it is numpy and plain Python, on the caller's thread. Nothing here knows more of peers than
their number.
"""
