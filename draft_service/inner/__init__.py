"""An inner drafter: what guesses the draft's own tokens, which the draft then decodes in fewer passes."""
