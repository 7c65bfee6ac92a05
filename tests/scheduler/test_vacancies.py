"""Workers in the order of their vacant slots."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.vacancies import Vacancies

CHANGES = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(-3, 3)))  # None: the worker goes


@given(CHANGES)
def test_the_order_is_by_vacant_slots_and_then_by_who_came_first(changes: list[tuple[str, int | None]]) -> None:
    vacancies, known = Vacancies(), dict[str, int]()
    for name, vacancy in changes:
        if vacancy is not None:
            vacancies.set(name, vacancy)
            known[name] = vacancy
        elif name in known:
            vacancies.remove(name)
            del known[name]
    assert list(vacancies.most()) == sorted(known, key=lambda name: -known[name])  # sorted keeps the order of equals
    assert sorted(vacancies.short()) == sorted(name for name in known if known[name] < 0)
    assert vacancies.waiting == any(vacancy < 0 for vacancy in known.values())
