# SPDX-License-Identifier: Apache-2.0
"""Word lists and templates the prompt makers draw from. `{name}` slots are filled by `fill`."""

from __future__ import annotations

import random
import re

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def _words(text: str) -> tuple[str, ...]:
    """Entries of a '|'-separated list; line breaks count as spaces."""
    return tuple(" ".join(entry.split()) for entry in text.split("|"))


SLOTS: dict[str, tuple[str, ...]] = {
    "topic": _words(
        """
        photosynthesis | the water cycle | black holes | plate tectonics | vaccines |
        antibiotic resistance | the French Revolution | the Roman Empire | jazz music |
        renewable energy | solar panels | electric cars | machine learning | neural networks |
        blockchain | inflation | supply and demand | the stock market | time management |
        remote work | healthy eating | meditation | yoga | marathon training | sleep | coffee
        brewing | sourdough bread | gardening tomatoes | beekeeping | bird watching | chess
        openings | photography | watercolor painting | Gothic architecture | the Silk Road |
        the Industrial Revolution | World War II | the Cold War | ancient Egypt | Greek
        mythology | Norse mythology | Buddhism | stoicism | existentialism | utilitarianism |
        free will | democracy | human rights | climate change | ocean acidification | coral
        reefs | rainforests | biodiversity | evolution | genetics | DNA replication | CRISPR |
        the immune system | the heart | the human brain | memory | language acquisition |
        bilingualism | child development | quantum mechanics | relativity | thermodynamics |
        electromagnetism | optics | nuclear fusion | chemical bonding | acids and bases | the
        periodic table | linear algebra | calculus | probability | prime numbers | graph
        theory | sorting algorithms | operating systems | databases | computer networks |
        cybersecurity | cryptography | open source software | video games | board games | film
        noir | Shakespeare | science fiction | poetry | short stories | opera | hip hop |
        classical music | modern dance | fashion design | urban planning | public transport |
        bridges | skyscrapers | space exploration | Mars | the Moon | satellites | telescopes
        | volcanoes | earthquakes | hurricanes | deserts | glaciers | rivers | wolves |
        elephants | whales | penguins | butterflies | dinosaurs | fossils | the human genome |
        nutrition | diabetes | stress | public speaking | negotiation | leadership | teamwork
        | job interviews | resumes | personal finance | budgeting | taxes | mortgages |
        insurance | startups | marketing | social media | journalism | advertising | education
        reform | online learning | libraries | museums | tourism in Japan | hiking in the Alps
        | travel in Italy | the history of tea | chocolate | cheese making | spices | street
        food | vegetarian cooking | camping | sailing | cycling | swimming | football tactics
        | basketball | tennis | the Olympic Games | robotics | drones | 3D printing | virtual
        reality | smartphones | the internet | cloud computing | privacy | artificial
        intelligence ethics | gender equality | immigration | poverty | globalization | trade
        | the United Nations | constitutional law | copyright | recycling | water conservation
        | organic farming | fishing | forestry | mining
        """
    ),
    "audience": _words(
        """
        a five-year-old | a high school student | a beginner | a busy manager | my grandmother
        | a college freshman | an expert | a group of tourists | new employees | teenagers
        """
    ),
    "person": _words(
        """
        a pirate captain | a medieval knight | a detective | Albert Einstein | a strict
        teacher | a friendly robot | a travel guide | Sherlock Holmes | a stand-up comedian |
        a chef | a time traveler | an astronaut on Mars | a wise old monk | a football coach |
        a news anchor | Cleopatra | Isaac Newton | a grumpy cat | Marie Curie | a therapist |
        a startup founder | a superhero | a judge | a poet | a doctor | Leonardo da Vinci
        """
    ),
    "form": _words(
        """
        blog post | short story | poem | letter | speech | product description | news article
        | dialogue | movie review | song lyrics | diary entry | press release | social media
        post | recipe | cover letter | essay | advertisement | haiku | fairy tale | memo
        """
    ),
    "tone": _words(
        """
        formal | funny | persuasive | friendly | dramatic | concise | professional | poetic |
        sarcastic | optimistic | serious | warm
        """
    ),
    "mail": _words(
        """
        ask for a deadline extension | apologize for a late delivery | invite a team to a
        workshop | decline a job offer | request a refund | thank a mentor | announce a new
        policy | schedule a meeting with a client | report a broken heater to a landlord |
        introduce a new colleague | ask a professor for a recommendation | cancel a
        subscription | complain about a noisy neighbor | follow up after an interview
        """
    ),
    "thing": _words(
        """
        a smartphone | a coffee machine | a bicycle | a city | a library | a school | a laptop
        | a mobile app | a restaurant | a garden | a museum | a podcast | a novel | a toy | a
        hospital | an airport | a website | a festival | a language course | a house
        """
    ),
    "place": _words(
        """
        Paris | Tokyo | New York | Hawaii | Rome | Cairo | Sydney | Iceland | Peru | India |
        Morocco | Vietnam | Berlin | London | Mexico City | Cape Town | Toronto | Istanbul
        """
    ),
    "country": _words(
        """
        France | Japan | Brazil | Canada | Egypt | Australia | Germany | India | Mexico |
        Kenya | Norway | China | Italy | Argentina | Turkey | Spain | Russia | South Korea
        """
    ),
    "sport": _words(
        """
        football world cup | rugby world cup | cricket world cup | Olympic Games | Super Bowl
        | NBA finals | Wimbledon final | Tour de France | World Series
        """
    ),
    "year": _words(
        """
        1912 | 1945 | 1969 | 1984 | 1994 | 1998 | 2002 | 2006 | 2010 | 2012 | 2016 | 2018
        """
    ),
    "work": _words(
        """
        Pride and Prejudice | Romeo and Juliet | the song Yesterday | The Great Gatsby | the
        movie Titanic | Game of Thrones | the Mona Lisa | Star Wars | The Lord of the Rings |
        Hamlet | the TV show Friends | The Lion King | 1984 | the song Bohemian Rhapsody |
        Harry Potter | Moby Dick | the movie Jaws | The Simpsons | the song Imagine | The
        Wizard of Oz | Breaking Bad | To Kill a Mockingbird | the Declaration of Independence
        """
    ),
    "organ": _words(
        """
        heart | liver | kidney | lungs | skin | brain | pancreas | stomach | spleen | small
        intestine | thyroid | bone marrow
        """
    ),
    "lang": _words(
        """
        Python | JavaScript | C++ | Java | Go | Rust | C | SQL | Bash | TypeScript | Python |
        Python | Python
        """
    ),
    "task": _words(
        """
        reverses a linked list | checks whether a string is a palindrome | finds the longest
        common prefix of a list of strings | merges two sorted lists | computes the nth
        Fibonacci number | counts the vowels in a sentence | removes duplicates from a list
        while keeping order | finds the two largest numbers of a list | validates an email
        address | parses a CSV file and sums a column | converts Roman numerals to integers |
        generates all permutations of a string | computes the greatest common divisor | checks
        whether a number is prime | implements binary search | implements quicksort |
        implements a stack with two queues | flattens a nested list | counts word frequencies
        in a text | rotates a matrix by 90 degrees | finds the median of a list | computes the
        edit distance of two strings | finds the shortest path in a grid | implements a simple
        bank account class | downloads a web page and prints its title | sorts a dictionary by
        value | converts Celsius to Fahrenheit | prints the first n rows of Pascal's triangle
        | detects a cycle in a graph | implements an LRU cache | finds all anagrams in a list
        of words | checks for balanced parentheses | computes compound interest | simulates
        rolling two dice | encodes a string with run-length encoding | finds the missing
        number from 1 to n | transposes a matrix | computes the factorial of a number
        recursively | returns the longest increasing subsequence | splits a list into chunks
        of size k | finds the intersection of two sets | computes a moving average | draws a
        histogram | reads a file line by line and counts lines | implements a trie | solves
        the N-queens problem | computes the sum of digits | finds the longest word in a
        sentence | converts a decimal number to binary | checks if two strings are isomorphic
        """
    ),
    "name": _words(
        """
        Anna | Tom | Maria | David | Sofia | Liam | Priya | Chen | Fatima | Carlos | Emma |
        Noah | Olivia | James | Ben | Lily
        """
    ),
    "item": _words(
        """
        apples | books | marbles | cookies | pencils | stickers | tickets | eggs | shirts |
        flowers | chairs | candles | toy cars | bottles of water
        """
    ),
    "n": tuple(str(i) for i in range(2, 60)),
    "subject": _words(
        """
        the city council | a local hospital | a tech company | the national football team | a
        young inventor | firefighters | a retired teacher | scientists at a university | a
        small bakery | the police | a famous actress | a group of students | the airline | a
        family of five | the prime minister | a charity | farmers | a museum | a chess
        champion | the railway operator
        """
    ),
    "event": _words(
        """
        a fire last night | a record harvest | a new discovery | an unexpected victory | a
        court decision | a data breach | a rescue at sea | a strike | a power outage | a new
        law | an anniversary | a flood | a lost dog | an election | a merger | a traffic
        accident | a medical breakthrough | a scandal | a robbery | a festival
        """
    ),
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "writing": (
        "Write a {tone} {form} about {topic}.",
        "Write a {form} about {topic} for {audience}.",
        "Write an email to {mail}. Keep it short and {tone}.",
        "Draft a {tone} email to {mail}.",
        "Compose a {tone} {form} on {topic} in less than 200 words.",
        "Describe {thing} in {place} vividly using all the senses.",
        "Could you write a captivating story opening about {person} who knows a lot about {topic}?",
        "Imagine you are writing a {form} comparing {topic} and {topic}. Write the opening paragraph.",
        "Write a travel blog post about a trip to {place}, highlighting culture and must-see sights.",
        "Edit the following paragraph to correct mistakes: '{name} go to the {place} yesterday and "
        "she seen many {item}. It were the most better day in her life.'",
    ),
    "roleplay": (
        "Pretend yourself to be {person}. Answer this question: what do you think about {topic}?",
        "Act as {person} and explain {topic}.",
        "You are {person}. Give me advice about {topic}.",
        "Imagine yourself as {person} tasked with explaining {topic} to {audience}. Begin.",
        "Let us play a game: I am {person} and you are {person}. We talk about {topic}. Start.",
    ),
    "reasoning": (
        "What are the advantages and disadvantages of {topic}?",
        "Which is more important, {topic} or {topic}? Give reasons.",
        "{name} is taller than {name}, and {name} is shorter than both. Who is the tallest? Explain.",
        "If all of the {item} in the box are red and {name} takes one, what color is it? Why?",
        "{name} has {n} {item}, all but {n} are lost. How many are left? Think step by step.",
        "Suppose {thing} became free for everyone. What would be the consequences?",
        "What is the relationship between {topic} and {topic}?",
        "One can observe that interest in {topic} has grown. What might explain this?",
    ),
    "stem": (
        "Explain {topic} in simple terms.",
        "How does {topic} work? Explain step by step.",
        "What are the key principles of {topic}?",
        "Describe the main applications of {topic}.",
        "What is the function of the {organ}, and what happens if it fails?",
        "Explain {topic} to {audience}.",
        "What experiment could demonstrate {topic}?",
        "Give five facts about {topic} and explain each of them.",
        "Design a solution using {topic} to improve life in {place}.",
    ),
    "humanities": (
        "What was the historical significance of {topic}?",
        "Discuss the influence of {topic} on modern society, with examples.",
        "Compare {topic} with {topic} in terms of their cultural impact.",
        "How did {topic} shape life in {country}?",
        "Provide insights into the causes of {topic}.",
        "What ethical questions arise from {topic}?",
        "Create a lesson plan about {topic} for {audience}.",
        "Write a short essay on how {topic} affected the economy of {country}.",
    ),
    "extraction": (
        "Extract all names and places from this sentence and return them as JSON: '{name} and {name} "
        "met in {place} before travelling to {country} to study {topic}.'",
        "Classify the sentiment of each review from 1 to 5: 'I love this {form} about {topic}.' "
        "'{thing} was a disappointment.' 'It was okay.' Return a JSON array.",
        "Given these categories - Science, History, Sports, Art - assign each question to one: "
        "'What is {topic}?', 'Who won the {sport} in {year}?', 'Who created {work}?'",
        "List the three most important terms of {topic} with one-line definitions, as a table.",
        "Count how many times the word '{name}' appears: '{name} saw {name} and {name} in {place}.'",
    ),
    "qa": (
        "Where was the {year} {sport} held?",
        "Who won the {sport} in {year}?",
        "Who wrote {work}?",
        "When was {work} first released?",
        "What is the capital of {country}?",
        "What is the largest city in {country}?",
        "Where is the {organ} located in the human body?",
        "What does the {organ} do?",
        "Who plays the main character in {work}?",
        "When did {country} gain independence?",
        "What is the official language of {country}?",
        "Who invented {topic}?",
        "What is the meaning of {topic}?",
        "How many people live in {place}?",
        "When did {topic} start?",
        "What is the currency of {country}?",
        "who sang {work}",
        "Why is {topic} important?",
        "What type of animal is related to {topic}?",
        "who was the president of the United States in {year}",
    ),
    "math": (
        "{name} has {n} {item} and buys {n} more every day for {n} days. How many {item} are there in "
        "the end?",
        "A box holds {n} {item}. {name} fills {n} boxes and gives away {n} {item}. How many {item} remain?",
        "{name} sells {item} for ${n} each. On Monday {name} sold {n} and on Tuesday twice as many. "
        "How much money did {name} make?",
        "Solve for x: {n}x + {n} = {n}.",
        "What is {n} times {n} plus {n}?",
        "A train travels {n} miles in {n} hours. How far does it travel in {n} hours at this speed?",
        "The sum of {n} and {n} is divided by {n}. What is the result?",
        "{name} is {n} years old and {name} is {n} years older. How old will they be together in {n} "
        "years?",
        "A rectangle is {n} cm long and {n} cm wide. What are its area and perimeter?",
        "{name} spends {n}% of a salary of ${n}00 on rent. How much is left?",
    ),
    "list": (
        "Give me {n} ideas for {thing} related to {topic}.",
        "List ten tips about {topic}.",
        "What are the best books about {topic}?",
        "Plan a three-day trip to {place}.",
        "Create a weekly schedule for someone interested in {topic}.",
        "What should I know before learning about {topic}?",
        "Make a shopping list for a party for {n}.",
        "How do I get started with {topic}?",
        "What are common mistakes in {topic}?",
    ),
}

CODE_TASKS = (
    "Write a {lang} program that {task}.",
    "Write a {lang} function that {task}.",
    "How can I write a function in {lang} which {task}? Explain the code.",
    "Implement a function in {lang} that {task}. Include an example of use.",
    "Write unit tests for a {lang} function that {task}.",
    "What is the time complexity of a function that {task}? Show an implementation in {lang}.",
    "Write a {lang} class that models {thing}, with a method that {task}.",
    "Explain the concept of {topic} with a short {lang} example.",
)

CODE_COMPLETE = (
    "{stub}",
    "{stub}\n",
    "{stub}\n",
    "Complete this function:\n\n{stub}\n",
    "Complete the following Python function.\n```python\n{stub}\n```",
    "Write the body of this Python function:\n\n{stub}\n",
    "Please continue to complete the function.\n```python\n{stub}\n```",
)

CODE_IMPORTS = (
    "from typing import List",
    "import math",
    "from typing import List, Tuple",
    "import re",
    "from typing import Any, Optional",
    "from collections import Counter",
)

SUMMARIES = (
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize the following text in three sentences.\n\n{text}",
    "{text}\n\nWhat are the main points of this text?",
    "Write a short summary of this article: {text}",
)

DOCUMENT_QUESTIONS = (
    "What is this text about?",
    "Who is mentioned in the text?",
    "Why is this important?",
    "What is the main subject described above?",
    "When did this happen?",
    "Where does this take place?",
    "What is the purpose of it?",
    "How does it work?",
    "Which names appear in the text?",
)

SELF_INSTRUCT_SYSTEMS = (
    "You are a helpful assistant who answers questions about {topic}.",
    "You are an AI assistant. The user asks for help with {topic}.",
    "You are a math tutor. The user brings a word problem with numbers.",
    "You are a {lang} programming assistant. The user asks for code that {task}.",
    "You rewrite the text of the user to be more {tone}.",
    "You summarize the text the user gives you. The text is a news story about {subject} and {event}.",
    "You are a writing assistant. The user asks for a {form} about {topic}.",
    "You answer trivia questions about {country} and {topic}.",
    "You extract facts as JSON from the text the user provides about {topic}.",
    "You are {person}. Stay in character.",
)

ARTICLES = (
    "Write a news report about {subject} and {event} in {place}. Include names, numbers and quotes.",
    "Write an encyclopedia article about {topic} with dates, names and places.",
    "Write a newspaper story: {event} involving {subject} in {country}, with quotes from witnesses.",
    "Write the plot and the cast of a film about {person} and {topic}.",
    "Write a short biography of {name}, who worked on {topic} in {place}.",
)

_SLOT = re.compile(r"\{(\w+)\}")


def fill(template: str, rng: random.Random) -> str:
    """Replaces every `{slot}` by an independent draw from its word list."""
    return _SLOT.sub(lambda match: rng.choice(SLOTS[match.group(1)]), template)


_ADJECTIVES = (
    "even",
    "odd",
    "positive",
    "negative",
    "unique",
    "repeated",
    "prime",
    "sorted",
    "smallest",
    "largest",
    "longest",
    "shortest",
    "common",
    "missing",
    "valid",
)
_NOUNS = (
    ("numbers", "List[int]", "[1, 2, 3, 4]"),
    ("words", "List[str]", "['apple', 'bob', 'cat']"),
    ("text", "str", "'Hello World'"),
    ("values", "List[float]", "[1.5, 2.0, 0.5]"),
    ("n", "int", "12"),
    ("matrix", "List[List[int]]", "[[1, 2], [3, 4]]"),
    ("string", "str", "'racecar'"),
    ("lst", "list", "[3, 1, 2]"),
)
_ACTIONS = (
    ("count", "int", "Return the number of {adj} elements in the given {noun}.", "2"),
    (
        "sum",
        "int",
        "Given {noun}, return the sum of all {adj} elements. Return 0 if there are none.",
        "6",
    ),
    ("filter", "list", "Filter the input {noun} so that only {adj} elements remain.", "[2, 4]"),
    (
        "find",
        "int",
        "Find the {adj} element in the given {noun}. If it does not exist, return -1.",
        "3",
    ),
    ("is", "bool", "Check if the given {noun} contains only {adj} elements.", "True"),
    (
        "remove",
        "list",
        "Remove every {adj} element from {noun} and keep the order of the others.",
        "[1, 3]",
    ),
    (
        "sort",
        "list",
        "Sort the {noun} so that {adj} elements come first, the rest in ascending order.",
        "[1, 2, 3]",
    ),
    ("index", "int", "Return the index of the first {adj} element of {noun}, or None.", "0"),
    (
        "replace",
        "list",
        "Replace each {adj} element of {noun} with its square or its length.",
        "[1, 4]",
    ),
    (
        "max",
        "int",
        "Out of the given {noun}, return the {adj} one. In case of ties return the first.",
        "4",
    ),
    (
        "split",
        "list",
        "Split {noun} into groups of {adj} elements and return a list of these.",
        "[[1], [2, 3]]",
    ),
)


def function_stub(rng: random.Random) -> str:
    """A typed Python signature with a docstring and doctest-like examples, for an invented task."""
    adjective = rng.choice(_ADJECTIVES)
    noun, kind, example = rng.choice(_NOUNS)
    verb, result, text, value = rng.choice(_ACTIONS)
    name = rng.choice((f"{verb}_{adjective}", f"{verb}_{adjective}_{noun}", f"{adjective}_{verb}"))
    doc = text.format(adj=adjective, noun=noun)
    arguments = f"{noun}: {kind}"
    if rng.random() < 0.3:
        arguments += ", k: int"
        doc += " Consider at most k elements."
    quote = rng.choice(('"""', '"""', "'''"))
    style = rng.random()
    if style < 0.5:
        shown = f"    >>> {name}({example})\n    {value}\n"
    elif style < 0.8:
        shown = f"    For example:\n    {name}({example}) == {value}\n"
    else:
        shown = ""
    annotated = (
        f"def {name}({arguments}) -> {result}:" if rng.random() < 0.7 else f"def {name}({noun}):"
    )
    head = rng.choice(("", "", "from typing import List\n\n\n", "import math\n\n\n"))
    return f"{head}{annotated}\n    {quote}{doc}\n{shown}    {quote}\n"


_GERMAN = {
    "S": (
        "Der Bürgermeister der Stadt",
        "Die junge Ärztin",
        "Ein bekannter Schriftsteller",
        "Das kleine Unternehmen aus Bayern",
        "Die Bundesregierung",
        "Der Verein",
        "Die Schüler",
        "Meine Großmutter",
        "Der Fußballspieler",
        "Die Polizei",
        "Das neue Museum",
        "Ein alter Mann",
        "Die Universität Heidelberg",
        "Der Trainer der Mannschaft",
        "Die Künstlerin",
    ),
    "V": (
        "hat im vergangenen Jahr",
        "hatte bereits am Montag",
        "wollte schon seit langem",
        "konnte trotz des schlechten Wetters",
        "musste nach langer Diskussion",
        "sollte im kommenden Sommer",
    ),
    "O": (
        "ein neues Haus",
        "die alte Brücke",
        "viele interessante Bücher",
        "einen großen Erfolg",
        "das wichtige Spiel",
        "die Straße am Bahnhof",
        "den Preis für Kultur",
        "eine lange Reise",
        "den Vertrag mit der Firma",
        "mehrere hundert Besucher",
    ),
    "P": (
        "gebaut",
        "verkauft",
        "gefeiert",
        "gewonnen",
        "verloren",
        "besucht",
        "beschrieben",
        "erwartet",
        "untersucht",
        "vorgestellt",
    ),
    "I": (
        "bauen",
        "verkaufen",
        "feiern",
        "gewinnen",
        "verlieren",
        "besuchen",
        "beschreiben",
        "erwarten",
        "untersuchen",
        "vorstellen",
    ),
    "T": (
        "",
        "",
        " , sagte ein Sprecher am Dienstag",
        " , obwohl die Kosten deutlich gestiegen sind",
        " und damit für große Freude gesorgt",
        " , weil die Bürger es so wollten",
        " , berichtete die Zeitung",
        " und wurde dafür von allen gelobt",
    ),
}


def german_sentence(rng: random.Random) -> str:
    """A German sentence of a small grammar."""
    verb = rng.choice(_GERMAN["V"])
    last = rng.choice(_GERMAN["P" if verb.startswith("hat") else "I"])
    subject, item, tail = (rng.choice(_GERMAN[key]) for key in "SOT")
    return f"{subject} {verb} {item} {last}{tail} ."
