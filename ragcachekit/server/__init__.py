"""A server with the HTTP interface of OpenAI."""
