"""Serving by vLLM: one vLLM process holds the backbone and the grafts as LoRA adapters, behind a thin proxy.

installation   finds a Python with vLLM
adapters       writes the carrier and the adapters of grafts, and knows which adapter a request needs
process        starts and stops vLLM
proxy          the HTTP server: names, keys, routing by the prompt; all else is vLLM's answer
serving        puts the parts together
"""
