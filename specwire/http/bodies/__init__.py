"""Request bodies, one module for each API, as pydantic models; unknown parameters are refused."""
