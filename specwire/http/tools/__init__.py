"""Tool calls: what a request asks for, and calls found in the text that the model writes.

fields.py    `tools`, `tool_choice`           JSON → nouns
formats.py   how models write calls           one `Format` each; which one a chat template teaches
json_scan.py JSON, character by character
parser.py    text → content and calls         at any cut of the text the same
frames.py    calls with certainty             a grammar of the format and the tools' schemas
answer.py    calls in responses               whole and streamed
"""
