"""An OpenAI-compatible HTTP front of a coordinator, and a page to look at: `specwire http`.

A process of its own, which speaks to the coordinator through the public SDK. Needs `specwire[http]`.

    body.py      what a request may say           JSON → nouns
    prompts.py   prompts and conversations        → token ids
    choices.py   the generations of one request   n at once, as fast as the client reads
    answers.py   what a response says             nouns → JSON, in the forms of both APIs
    exchange.py  one request on the wire          JSON or SSE, ended when the client goes
    app.py       routes                           server.py: the process
"""
