"""Text in, batches of tokens out: sources, documents, tokenizers, the corpus, its slots, and a peer's reader.

    files  = expand_sources(["python-stdlib"])                       sources.py
    texts  = read_documents(files, ...)                              documents.py, rows.py, parquet.py
    corpus = tokenize(texts, tokenizer)                              corpus.py
    train, held_out = corpus.split(0.05)
    slots  = Slots.cut(train, 64, seed)                              slots.py
    reader = Reader(slots, 128)                                      reader.py
    reader.hold([(slot, 0, 0) for slot in range(64)])

All of it is numpy and plain Python, on the caller's thread. Nothing here knows of peers: which
slots a reader holds is told to it.
"""
