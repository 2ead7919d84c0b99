"""A certificate in words, as people say it."""

from ecinn.classifier.out_of_distribution import IN_WORDS
from ecinn.drawing.pictures import percent
from ecinn.explanation.result import Explanation


def reasons(e_reasons: tuple[str, ...]) -> list[str]:
    """Why a picture is unlike the training images."""
    return [f"it is {IN_WORDS[reason]}" for reason in e_reasons]


def certificate(e: Explanation, row: int, column: int) -> list[str]:
    """What is known of one counterfactual, the most important first."""
    p, q = int(e.p[row]), int(e.q[row, column])
    verdict = e.convincing_certificate.verdict[row, column]
    winner = int(e.convincing_certificate.winner[row, column])
    share = percent(float(verdict[winner]))
    said = [f"The stored picture is read as {article(e.class_names[winner])} with {share}."]
    if winner != q:
        said.append(f"It did not become {article(e.class_names[q])}.")
    if e.confidence is not None and not bool(e.reachable[row, column]):
        best = percent(float(e.convincing_certificate.posterior[row, column, q]))
        said.append(f"More than {best} cannot be had on this way.")
    elif e.confidence is not None and not bool(e.as_asked[row, column]):
        said.append(f"{percent(e.confidence)} was asked for.")
    third = int(e.third_class[row, column])
    pair = f"{article(e.class_names[p])} and {article(e.class_names[q])}"
    if third >= 0:
        said.append(
            f"At the tipping point {pair} tie, but {article(e.class_names[third])} wins there."
        )
    else:
        said.append(f"At the tipping point {pair} tie.")
    if e.reasons(row):
        why = " and ".join(reasons(e.reasons(row)))
        said.append(f"Take care: this picture is unlike the training pictures ({why}).")
    return said


def article(name: str) -> str:
    """A digit with its article; other classes as they are called.

    >>> article("8"), article("3"), article("smiling")
    ('an 8', 'a 3', 'smiling')
    """
    if not name.isdigit():
        return name
    return f"an {name}" if name.startswith("8") or name in ("11", "18") else f"a {name}"
