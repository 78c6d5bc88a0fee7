"""Does a question and its answer make a real model prefer the right form of a translation?"""
