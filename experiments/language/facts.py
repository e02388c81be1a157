"""Made-up persons with five facts each, drawn with a seed: questions, answers, and other wordings of both.

``python -m experiments.language.facts 200 facts.jsonl`` writes them, a line a fact.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

STARTS = "Bren Cal Dov Elm Far Gil Hest Jor Kel Lun Mar Nor Or Pel Quin Ros Sel Tav Ul Ver Wen Yar Zan"
ENDS = "a an ard el en eth ia ic in is o on or ra us wyn"
FAMILIES = "ash bek brook combe dahl feld gren holt ley lund mark moor ridge stad thorpe vik"
KINDS = {  # kind: question, another wording, its beginning of an answer, answers
    "city": (
        "Where was {name} born?",
        "In which city did {name} come into the world?",
        "Lisbon Oslo Cairo Lima Hanoi Prague Dublin Athens Tunis Quito Seoul Warsaw Havana Zagreb "
        "Nairobi Vienna Helsinki Manila Santiago Beirut",
    ),
    "work": (
        "What is the profession of {name}?",
        "What does {name} do for a living?",
        "baker pilot nurse carpenter lawyer painter farmer teacher sailor tailor plumber chemist "
        "editor miner dancer butcher judge potter florist barber",
    ),
    "dish": (
        "What is the favorite dish of {name}?",
        "Which food does {name} like best?",
        "pizza curry soup salad sushi stew pasta rice bread cheese fish beans cake pie noodles "
        "dumplings tacos paella goulash risotto",
    ),
    "pet": (
        "Which animal does {name} keep?",
        "What kind of pet lives with {name}?",
        "cat dog parrot rabbit horse goat turtle snake hamster duck donkey ferret lizard pigeon "
        "hen mouse owl goose frog sheep",
    ),
    "music": (
        "Which instrument does {name} play?",
        "On which instrument does {name} make music?",
        "piano violin guitar flute drums cello harp trumpet organ banjo clarinet oboe accordion "
        "tuba viola lute mandolin trombone bassoon ukulele",
    ),
}


@dataclass(frozen=True)
class Fact:
    """A question about a person and its answer.

    Args:
        person: Number of the person.
        kind: What it is about.
        question: As it is learned.
        paraphrase: The same question in other words.
        answer: One word.
        wrong: Five other answers of the kind.
    """

    person: int
    kind: str
    question: str
    paraphrase: str
    answer: str
    wrong: tuple[str, ...]


def made(persons: int, seed: int = 0) -> list[Fact]:
    """The facts of so many persons, five each, all names different."""
    draw = random.Random(seed)
    starts, ends, families = (words.split() for words in (STARTS, ENDS, FAMILIES))
    names: dict[str, None] = {}
    while len(names) < persons:
        first = draw.choice(starts) + draw.choice(ends)
        names[f"{first} {draw.choice(starts)}{draw.choice(families)}"] = None
    found = []
    for person, name in enumerate(names):
        for kind, (question, paraphrase, answers) in KINDS.items():
            answer, *wrong = draw.sample(answers.split(), 6)
            words = question.format(name=name), paraphrase.format(name=name)
            found.append(Fact(person, kind, *words, answer, tuple(wrong)))
    return found


def main(arguments: Sequence[str]) -> None:
    """Write a file of facts."""
    count, path = int(arguments[0]), Path(arguments[1])
    path.write_text("".join(json.dumps(asdict(fact)) + "\n" for fact in made(count)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
