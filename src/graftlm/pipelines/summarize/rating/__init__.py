"""Human evaluation of summaries: a page that collects ratings, and what they say."""

from graftlm.pipelines.summarize.rating.agreement import ordinal_alpha
from graftlm.pipelines.summarize.rating.page import CRITERIA, Item, RatingPage, rating_page
from graftlm.pipelines.summarize.rating.ratings import Ratings
from graftlm.pipelines.summarize.rating.sources import items_of, systems_of

__all__ = [
    "CRITERIA",
    "Item",
    "RatingPage",
    "Ratings",
    "items_of",
    "ordinal_alpha",
    "rating_page",
    "systems_of",
]
