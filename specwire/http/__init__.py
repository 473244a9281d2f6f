"""An OpenAI-compatible HTTP front of a coordinator, with a demo page: `specwire http`.

A process of its own, which uses the coordinator through the public SDK. Needs `specwire[http]`.

    origins.py   checks of Host and Origin, CORS
    bodies/      request bodies                   JSON → nouns
    access.py    ids, warnings, spans and log of all requests
    entry.py     the caller's token, and the body of a request, within limits
    metrics.py   of the front, and /metrics
    answers.py   response bodies                  nouns → JSON, in the forms of both APIs
    responses.py the same in the form of /v1/responses
    openapi.py   what is served, as a document and as a page
    exchange.py  one request on the wire          n generations at once, as fast as the client reads, JSON or
                                                  SSE; cancelled when the client disconnects
    model.py     cached answers of the coordinator, the model and its tokenizer
    app.py       routes                           server.py: the process; connections.py: limits
"""
