"""The native engine: a sampling server on plain torch that speaks SGLang's HTTP contract.

Flow of one request::

    HTTP (app) -> payload -> Gate -> ModelThread queue -> Scheduler -> Decoder + Sampler
                                                              |
    answers <- event loop <- call_soon_threadsafe <- Outcome <-+

One asyncio loop speaks HTTP and never touches a tensor; one model thread owns every tensor.
``python -m workers.engines.native --help`` lists the options.
"""
