"""Tool calls in conversations; `bodies/tools.py` has the fields of a request, and forced calls.

formats.py   how models write calls           one `Format` each; which one a chat template teaches
json_scan.py JSON, character by character
parser.py    text → content and calls         the same at any cut of the text
calls.py     content and calls → JSON         whole and in deltas; the response of a conversation with tools
"""
