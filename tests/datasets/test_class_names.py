"""Names of classes, and the two orders of names with numbers in them."""

import pytest

from datasets.class_names import check_names, check_order, sort_by_number, two_orders

TWO_ORDERS = {  # names in the order by number, and both orders as a message has them
    "numbers": ([*map(str, range(12))], "0, 1, 10, 11, 2, … as text, 0, 1, 2, 3, 4, … as numbers"),
    "some padded": (["01", "1", "2", "10"], "01, 1, 10, 2 as text, 01, 1, 2, 10 as numbers"),
    "negative": (["-2", "-1", "0"], "-1, -2, 0 as text, -2, -1, 0 as numbers"),
    "fractions": (["0.25", "0.5", "9.5", "10"], "0.25, 0.5, 10, 9.5 as text, 0.25, 0.5, 9.5, 10 as numbers"),
    "numbers in names": (["class 2", "class 10"], "class 10, class 2 as text, class 2, class 10 as numbers"),
    "numbers before names": (["1_cat", "2_dog", "10_owl"], "10_owl, 1_cat, 2_dog as text, 1_cat, 2_dog, 10_owl as num"),
    "late": ([f"{n:03}" for n in range(1001)], "…, 099, 100, 1000, 101, 102, … as text, …, 099, 100, 101, 102, 103, …"),
}
ONE_ORDER = ([*"0123456789"], ["00", "01", "11"], ["n01440764", "n02119789"], ["car", "car-1", "car1"], ["cat", "Dog"])


@pytest.mark.parametrize("case", TWO_ORDERS)
def test_numbers_in_names_give_a_second_order(case):
    names, shown = TWO_ORDERS[case]
    assert sort_by_number(sorted(names)) == names and two_orders(names).startswith(shown)
    with pytest.raises(ValueError, match=f"^FILE does not name its {len(names)} classes, .* Give order=text or "):
        check_order(sorted(names), "FILE", "order")
    check_order(sorted(names), "FILE", None)  # somebody chose
    check_order(names, "FILE", "order")


@pytest.mark.parametrize("names", ONE_ORDER)
def test_other_names_have_one_order(names):
    assert two_orders(names) is None and sort_by_number(names) == sorted(names)
    check_order(sorted(names), "FILE", "order")


def test_names_are_one_line_of_text():
    check_names(enumerate(["wood", "Straße 1", "\U0001f469\u200d\U0001f52c"]))  # the last is joined by an invisible one
    for name in ("\ud800", "\udcff", "", " ", "a\nb", "a\u2028b", "a\x1b[31m", None, 3, ["a"]):
        with pytest.raises(ValueError, match="^FILE: class 7 is called .*; expected one line of text in UTF-8, not em"):
            check_names([(5, "wood"), (7, name)], "FILE: ")
