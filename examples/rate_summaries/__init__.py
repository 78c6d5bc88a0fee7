"""Human evaluation of summaries: a page that collects ratings, and the results of the ratings."""
# ruff: noqa: F401  # the names of this package

from examples.rate_summaries.page import (
    CRITERIA,
    RatingItem,
    load_rating_items,
    parse_systems,
    rating_page,
)
from examples.rate_summaries.ratings import Ratings, ordinal_alpha
