"""MiniMalloc's files: read as written, and refused with the line that is wrong."""

import pytest

from squeezebox import memory
from squeezebox.schema import Buffer, FormatError

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def write(folder, text):
    path = folder / "buffers.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_comes_back_with_offsets(tmp_path):
    buffers = memory.read_buffers(write(tmp_path, EXAMPLE))
    assert buffers[1] == Buffer(name="b2", lower=3, upper=9, nbytes=4)
    made = memory.layout(buffers, alignment=1)
    assert made.nbytes == 12
    lines = memory.layout_csv(buffers, made).splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rsplit(",", 1)[0] for line in lines] == EXAMPLE.splitlines()
    assert [int(line.rsplit(",", 1)[1]) for line in lines[1:]] == list(made.offsets)


def test_columns_may_come_in_any_order_with_names_that_need_quotes(tmp_path):
    path = write(tmp_path, 'size,id,upper,lower\n7,"a,b",2,1\n\n')
    (only,) = memory.read_buffers(path)
    assert only == Buffer(name="a,b", lower=1, upper=2, nbytes=7)
    assert '"a,b",1,2,7,0' in memory.layout_csv([only], memory.layout([only]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"line 1 names the columns \(none\)"),
        ("id,lower,upper\n", "line 1 names the columns id,lower,upper"),
        ("id,lower,upper,size,alignment\n", "names the columns id,lower,upper,size,alignment"),
        (EXAMPLE + "b6,0,1\n", "line 7 has 3 values for 4 columns"),
        (EXAMPLE + "b6,0,1,many\n", "line 7 has size 'many'"),
        (EXAMPLE + "b6,0,1,-4\n", "line 7 has size '-4'"),
        (EXAMPLE + "b6,5,5,4\n", "line 7 has lower 5 and upper 5"),
        (EXAMPLE + "b2,0,1,4\n", "lines 3 and 7 have the same id 'b2'"),
        (EXAMPLE + '"b6,0,1,4\n', "unexpected end of data"),
        (EXAMPLE + "b6,0,1,1_000\n", "line 7 has size '1_000'"),
        (EXAMPLE + "b6,0,1,\u0663\n", "line 7 has size '\u0663'"),
        (EXAMPLE + '"b\n6",0,1,4\nb7,0,1,x\n', "line 9 has size 'x'"),
        (EXAMPLE + f"b6,0,1,{'9' * 6000}\n", r"line 7 has size '9{40}\.\.\.', which"),
    ],
)
def test_the_line_that_is_wrong_is_named(tmp_path, text, words):
    with pytest.raises(FormatError, match=words):
        memory.read_buffers(write(tmp_path, text))


def test_a_mark_of_the_byte_order_is_no_part_of_a_name(tmp_path):
    assert len(memory.read_buffers(write(tmp_path, "\ufeff" + EXAMPLE))) == 5


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FormatError, match="nowhere.csv' cannot be read"):
        memory.read_buffers(tmp_path / "nowhere.csv")
