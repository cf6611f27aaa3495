"""Pages: their markup."""

from dkcls.report.page import (
    Section,
    chart,
    folded,
    heading,
    highlights,
    page,
    paragraph,
    table,
)


def test_words_of_the_user_are_no_markup():
    name = 'a<b & "c"'
    escaped = "a&lt;b &amp; &quot;c&quot;"
    parts = [
        paragraph(name),
        heading(name),
        chart(b"", name),
        highlights({name: name}),
        folded(name, name),
        table([{name: name}]),
    ]
    text = page(name, name, [Section(name, "".join(parts))], name)
    assert name not in text
    assert "a<b" not in text
    assert text.count(escaped) >= 5 + sum(part.count(escaped) for part in parts)


def test_the_best_row_of_a_table_stands_out_and_numbers_are_on_the_right():
    text = table([{"name": "a", "top1": "1.0"}, {"name": "b", "top1": "+2"}, {"name": "c"}], best=1)
    assert "<tr class=best><td>b</td><td class=number>+2</td></tr>" in text
    assert text.count("class=best") == 1
    assert "<td>c</td><td class=number></td>" in text
