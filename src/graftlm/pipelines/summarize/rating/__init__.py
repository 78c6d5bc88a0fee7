"""Human evaluation of summaries: a page that collects ratings, and what they say."""

from graftlm.pipelines.summarize.rating.agreement import ordinal_alpha
from graftlm.pipelines.summarize.rating.page import CRITERIA, RatingItem, RatingPage, rating_page
from graftlm.pipelines.summarize.rating.ratings import Ratings
from graftlm.pipelines.summarize.rating.sources import load_rating_items, parse_systems

__all__ = [
    "CRITERIA",
    "RatingItem",
    "RatingPage",
    "Ratings",
    "load_rating_items",
    "ordinal_alpha",
    "parse_systems",
    "rating_page",
]
