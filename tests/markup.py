"""Reads HTML in tests: its tags, attributes and words, and whether it is well-formed and self-contained."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Read(HTMLParser):
    """The tags, attributes and words of a piece of HTML; `wrong` lists tags left open or closed twice."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words, self.wrong = [], [], [], [], []
        self.feed(text)
        self.close()
        self.wrong += self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    def all(self, name):
        return [value for key, value in self.attributes if key == name]


def check_self_contained(read: Read, script=False):
    """Asserts that HTML is well-formed, loads nothing from elsewhere and runs nothing but its own `script`."""
    assert not read.wrong
    assert ("script" in read.tags) == script
    assert not {"link", "iframe", "object", "embed", "base", "form", "a"} & set(read.tags)
    assert not [key for key, _ in read.attributes if key.startswith("on")]
    for key, value in read.attributes:
        if key in ("src", "href", "xlink:href", "srcset", "data"):
            assert value.startswith(("#", "data:image/png;base64,")), value
        elif not key.startswith("xmlns"):
            assert "http" not in (value or ""), (key, value)
