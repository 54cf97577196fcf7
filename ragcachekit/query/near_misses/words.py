"""English words for the near-miss guard: opposites, words that mean the same, what asks for what."""

from __future__ import annotations


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


FUNCTION = _set(
    """a an the this that these those there here it its he his him she her they them their we us our
    i me my you your one ones such as about so too also just very quite is are was were been being
    be do does did done doing have has had having can could shall will would please tell know want
    say show explain describe name find quick hello hi hey thanks thank briefly exactly actually
    basically called call calls term kind kinds sort sorts type types way ways thing things whats
    hows whens wheres whos well really truly indeed precisely"""
)
"""Words that carry no meaning of their own in a question."""

EMPHASIS = _set("exactly precisely really actually")
"""Words between a question word and its verb."""

EMBEDDING = _set("know tell me say wonder explain remember recall out")
"""Words before a question inside another one."""

LEAD = _set(
    """just curious for to with wonder wondering notes note more question ask asking help with
    interested sorry hello hey there everybody everyone anyone know like would need report homework
    remind again thanks"""
)
"""Words of which short clauses before a question and a colon are made."""

AUXILIARIES = _set(
    "is are was were am be been do does did has have had can could may might shall should will would must"
)

NEGATIONS = _set(
    """not no never none neither nor nobody nothing nowhere without cannot cant dont doesnt didnt isnt arent
    wasnt werent wont wouldnt shouldnt couldnt hasnt havent hadnt except excluding non hardly rarely
    seldom lacks lack lacking fail fails failed unless instead unable"""
)

DIRECTED = _set("from by with for as into onto over under than against between before after via through")
"""Prepositions that say which way: who hired Mia, who was hired by Mia. "To" is mostly no preposition."""

PREPOSITIONS = _set("of in on at to") | DIRECTED

_OPPOSITES = """
    large larger largest big bigger biggest great greatest major / small smaller smallest tiny minor
    long longer longest / short shorter shortest
    high higher highest tall taller tallest upper top above / low lower lowest bottom below beneath
    more most maximum max maximal / less least fewer fewest minimum min minimal
    fast faster fastest quick quicker quickest quickly rapid / slow slower slowest slowly
    old older oldest / young younger youngest new newer newest
    early earlier earliest / late later latest
    before prior / after since
    good better best / bad worse worst
    heavy heavier heaviest / light lighter lightest
    strong stronger strongest / weak weaker weakest
    near nearer nearest close closest / far farther farthest distant
    hot hotter hottest warm / cold colder coldest cool
    easy easier easiest simple simplest simplicity / hard hardest difficult complex complexity
    rich richer richest / poor poorer poorest
    wide wider widest broad / narrow narrower narrowest
    deep deeper deepest / shallow shallower
    increase increases increased increasing grow grew grown rise rose / decrease decreases decreased shrink
    begin begins began begun start starts started / end ends ended finish finished stop stopped
    win wins won victory / lose loses lost defeat loss
    north northern / south southern
    east eastern / west western
    left / right
    input inputs / output outputs
    import imports imported / export exports exported
    buy buys bought purchase / sell sells sold sale
    accept accepts accepted / reject rejects rejected refuse refused
    include includes included including / exclude excludes excluded
    allow allows permit permits permitted / forbid forbids forbidden ban banned prohibit prohibited
    true / false
    internal inner inside interior / external outer outside exterior
    male / female
    positive / negative
    public / private
    same equal identical / different unequal
    born birth / died die dies death
    arrive arrives arrived / depart departs departed leave leaves
    enter enters entered / exit exits exited
    sender send sends sent / receiver receive receives received
    lend lends lent / borrow borrows borrowed
    succeed succeeded successor next / precede preceded predecessor previous
    advantage advantages benefit benefits / disadvantage disadvantages drawback drawbacks
    cause causes / effect effects
    employer employers / employee employees
    ancient / modern
    question questions problem problems / answer answers solution solutions
    king father son husband brother man boy / queen mother daughter wife sister woman girl
    always / sometimes
    add adds added / remove removes removed delete deletes deleted
    enable enables enabled / disable disables disabled
    read reads / write writes
    push pushes / pull pulls
    encrypt / decrypt
    encode / decode
    install / uninstall
    login / logout
    attack attacked / defend defended
    common often frequently usually frequent / uncommon rare
    finite limited bounded / infinite unlimited unbounded
    abstract / concrete
    formal / informal
    exact accurate / approximate inaccurate
    deterministic / randomized nondeterministic
    original / final
    empty / full
    mutable / immutable
    local / global
    client / server
    odd / even
    to into / from
    up / down
    on / off
"""

POLES: dict[str, tuple[int, int]] = {
    word: (group, sign)
    for group, line in enumerate(_OPPOSITES.strip().splitlines())
    for sign, side in zip((1, -1), line.split(" / "), strict=True)
    for word in side.split()
}
"""Group of opposites and side of a word."""

_SAME = """
    build built construct constructed construction erect
    establish established founded founder create created creator
    write wrote written author
    invent inventor
    discover discovery
    design architect
    teach taught teacher
    direct director
    paint painter
    population people inhabitants
    live lives lived living
    cost costs price
    tall height
    weigh weight heavy
    size large big
    fast speed quickly
    far distance
    old age
    city town
    nation country state
    company firm
    locate located location situated lie lies stand stands
    contain contains consist consists comprise
    produce produces produced manufacture
    speak spoken speaks
    ceo executive
    job occupation profession
    return returns
    function method
    module library package
    differ difference
    travel travels
    number amount quantity
    percentage share proportion portion
    month monthly
    year yearly annual
    rule ruled ruler govern
    safe safely
    permit allow allowed
    happen occur event
    require required requirement
    error exception
    folder directory
    default defaults
    change modify
"""
SYNONYMS: dict[str, str] = {
    word: line.split()[0] for line in _SAME.strip().splitlines() for word in reversed(line.split())
}
"""The word that stands for a group of words that mean the same in questions."""

NUMBERS = _set(
    """zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    hundred thousand million billion trillion first second third fourth fifth sixth seventh eighth
    ninth tenth eleventh twelfth last final half once twice thrice pair dozen"""
)
"""Numbers in words, compared as they are written."""

ASKING: dict[str, str] = {
    "who": "who", "whom": "who", "whose": "who", "when": "when", "where": "where", "why": "why", "how": "how",
    "what": "what", "which": "what",
}  # fmt: skip
ASKED_BY_NOUN: dict[str, str] = {
    **dict.fromkeys(_set("year date day time century decade month hour deadline"), "when"),
    **dict.fromkeys(_set("place location country city region town"), "where"),
    **dict.fromkeys(_set("person man woman king people"), "who"),
    **dict.fromkeys(_set("reason"), "why"),
    **dict.fromkeys(_set("number amount percentage share"), "count"),
}
CONSUMED = _set(
    "year date day time hour place location person man woman reason number amount percentage share"
)
"""What "what year" or "which place" asks for."""
