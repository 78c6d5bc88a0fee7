"""Does a question and its answer make a language model prefer the right form of a translation?"""
