"""Request bodies, one module for each API, as pydantic models; unknown parameters are refused.

part.py         what all bodies have in common      validation.py    JSON → body, errors in OpenAI's format
generating.py   what both generating APIs share
completion.py, chat.py, responses.py, tokens.py   one API each
message.py, items.py   conversations            calling.py, tools.py   functions that the model may call
"""
