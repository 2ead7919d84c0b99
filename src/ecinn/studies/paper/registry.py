"""All figures, tables and claims, in the paper's order."""

from ecinn.studies.paper import digits
from ecinn.studies.paper.artefact import Artefact
from ecinn.studies.paper.claims import CLAIMS
from ecinn.studies.paper.faces import FIGURE_8, FIGURE_9
from ecinn.studies.paper.geometry import FIGURE_2
from ecinn.studies.paper.pipeline import FIGURE_1
from ecinn.studies.paper.supplement import SUPPLEMENT
from ecinn.studies.paper.table_1 import TABLE_1
from ecinn.studies.paper.trade_off import FIGURE_10, SUPPLEMENT_10

ARTEFACTS: tuple[Artefact, ...] = (
    FIGURE_1,
    FIGURE_2,
    digits.FIGURE_3,
    digits.FIGURE_4,
    digits.FIGURE_5,
    digits.FIGURE_6,
    digits.FIGURE_7,
    FIGURE_8,
    FIGURE_9,
    FIGURE_10,
    TABLE_1,
    CLAIMS,
    *SUPPLEMENT,
    SUPPLEMENT_10,
)
