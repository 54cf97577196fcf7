"""The order of chunks in documents, against a list per document."""

from hypothesis import given
from hypothesis import strategies as st

from ragcachekit.plan.companions import NEAR, DocumentOrder

DOCUMENTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 40), st.booleans()), max_size=60
)


@given(DOCUMENTS)
def test_it_is_the_order_of_a_sorted_list_per_document(steps):
    order, known = DocumentOrder(), {}
    for document, start, chunk, adds in steps:
        text = f"chunk {chunk}"
        if adds:
            order.add(document, [f"{text}\n"], [start])
            known.setdefault(text, (document, start))
        else:
            order.discard([text])
            known.pop(text, None)
        assert len(order) == len(known)
        for text, (name, place) in known.items():
            whole = sorted((s, t) for t, (d, s) in known.items() if d == name)
            at = whole.index((place, text))
            before = [t for _, t in whole[:at]][::-1][:NEAR]
            assert order.of(f" {text} ") == tuple(before)
            assert order.of(text, following=True) == (*before, *[t for _, t in whole[at + 1 :]][:NEAR])


def test_without_starts_chunks_follow_by_arrival():
    order = DocumentOrder()
    order.add("a", ["one", "two", ""])
    order.add("b", ["else", "one"])
    order.add("a", ["three"])
    assert order.of("three") == ("two", "one")
    assert order.of("one", following=True) == ("two", "three"), "a chunk belongs to its first document"
    assert order.of("unknown") == ()
