"""A server that speaks the OpenAI protocol, for one backbone and its grafts, and a page where one watches them work."""
