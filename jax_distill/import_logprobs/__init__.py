"""Logprobs that were made elsewhere, by an inference server or an API, as a cache to train from.

    python -m jax_distill.import_logprobs --config X.yaml --data.path logprobs.jsonl
    python -m jax_distill.train --config X.yaml --data.path logprobs.jsonl

`reading` is the files' forms, `writing` the caches.
"""
