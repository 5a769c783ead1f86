// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::tree::{Entry, Item, Value};

fn tree(text: &str) -> Tree {
    parse_str("test.conf", text.as_bytes()).unwrap().tree
}

fn value<'a>(tree: &'a Tree, path: &str) -> Option<&'a str> {
    tree.path(path).map(|value| value.text().unwrap())
}

#[test]
fn sections_values_and_comments_are_read() {
    let tree = tree("a { # comment\n b = one two # comment\n c{d=x}\n}\nlast = 1");
    assert_eq!(value(&tree, "a.b"), Some("one two"));
    assert_eq!(value(&tree, "a.c.d"), Some("x"));
    assert_eq!(value(&tree, "last"), Some("1"));
}

#[test]
fn quoted_strings_keep_blanks_and_know_escapes() {
    let tree = tree("a = \"x  #}\\\"\\\\\\n\\\n  y\" z");
    assert_eq!(value(&tree, "a"), Some("x  #}\"\\\n  y z"));
}

#[test]
fn an_empty_assignment_unsets_and_an_empty_string_sets() {
    let tree = tree("p { a = 1\n b = 2 }\nq : p { a =\n b = \"\" }");
    assert_eq!(value(&tree, "q.a"), None);
    assert_eq!(value(&tree, "q.b"), Some(""));
}

#[test]
fn repeated_sections_merge_and_repeated_keys_keep_their_position() {
    let parsed = parse_str("t", b"s { a = 1\n b = 2 }\ns { a = 3\n c = 4 }").unwrap();
    let section = parsed.tree.section("s").unwrap();
    let names: Vec<_> = section.entries().iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(value(&parsed.tree, "s.a"), Some("3"));
    assert_eq!(parsed.warnings.len(), 1);
    assert_eq!(parsed.warnings[0].code, "repeated-key");
}

#[test]
fn references_inherit_keys_and_sections_with_the_first_parent_winning() {
    let tree = tree(
        "x : p.one, two { own = 0 }\np { one { a = 1\n sub { k = 1 } } }\n\
         two { a = 2\n b = 2\n sub { l = 2 } }\ny : x { sub { own = 1 } }",
    );
    assert_eq!(value(&tree, "x.a"), Some("1"));
    assert_eq!(value(&tree, "x.b"), Some("2"));
    assert_eq!(value(&tree, "x.sub.k"), Some("1"));
    assert_eq!(value(&tree, "x.sub.l"), Some("2"));
    assert_eq!(value(&tree, "y.sub.own"), Some("1"));
    assert_eq!(value(&tree, "y.sub.k"), Some("1"));
    assert_eq!(value(&tree, "y.own"), Some("0"));
}

#[test]
fn loops_of_references_end() {
    let tree = tree("a : b { x = 1 }\nb : a { y = 2 }");
    assert_eq!(value(&tree, "a.y"), Some("2"));
    assert_eq!(value(&tree, "b.x"), Some("1"));
}

#[test]
fn references_that_multiply_are_refused() {
    let mut text = String::new();
    for level in 0..40 {
        text.push_str(&format!(
            "a{level} : a{0}, b{0} {{ x = 1 }}\nb{level} : a{0}, b{0} {{ x = 1 }}\n",
            level + 1
        ));
    }
    let error = parse_str("t", text.as_bytes()).unwrap_err();
    assert_eq!(error.code, "too-large");
}

#[test]
fn a_large_template_is_inherited_by_thousands_of_sections() {
    let keys: String = (0..20).map(|n| format!("k{n} = {n}\n")).collect();
    let mut text = format!("t {{ {keys} local {{ auth = psk }} }}\n");
    for n in 0..5_000 {
        text.push_str(&format!("c{n} : t {{ own = {n} }}\n"));
    }
    let parsed = parse_str("t", text.as_bytes()).unwrap();
    assert_eq!(value(&parsed.tree, "c4999.k19"), Some("19"));
    assert_eq!(value(&parsed.tree, "c4999.local.auth"), Some("psk"));
}

#[test]
fn a_section_that_refers_to_its_parent_is_refused() {
    let error = parse_str("t", b"a { b : a { } }").unwrap_err();
    assert_eq!(error.code, "too-large");
}

#[test]
fn includes_splice_sorted_files_into_the_section() {
    let mut files = MemoryFiles::new();
    files
        .insert("/etc/main.conf", "s {\n include d/*.conf\n}\n")
        .insert("/etc/d/2.conf", "a = two\nb = 2")
        .insert("/etc/d/1.conf", "a = one")
        .insert("/etc/d/.hidden.conf", "a = hidden");
    let parsed = parse_file(Path::new("/etc/main.conf"), &files).unwrap();
    assert_eq!(value(&parsed.tree, "s.a"), Some("two"));
    assert_eq!(value(&parsed.tree, "s.b"), Some("2"));
    assert_eq!(parsed.files.len(), 3);
}

#[test]
fn a_file_that_includes_itself_is_refused() {
    let mut files = MemoryFiles::new();
    files.insert("/a.conf", "include a.conf");
    let error = parse_file(Path::new("/a.conf"), &files).unwrap_err();
    assert!(error.message.contains("include each other"), "{error}");
}

#[test]
fn include_can_be_a_key() {
    assert_eq!(value(&tree("include = x"), "include"), Some("x"));
}

#[test]
fn errors_say_where() {
    for (text, line, column) in [
        ("a {\n b = 1\n", 1, 1),
        ("a {\n}\n}\n", 3, 1),
        ("a {\n b.c { }\n}", 2, 3),
        ("a = \"x\n", 1, 5),
        ("a b\n", 1, 3),
        ("x {\n  a = b }c\n}\n", 3, 1),
    ] {
        let error = parse_str("t", text.as_bytes()).unwrap_err();
        let place = error.location.as_ref().unwrap();
        assert_eq!((place.line, place.column), (line, column), "{text:?}");
    }
}

#[test]
fn deep_nesting_is_refused() {
    let text = "a {".repeat(100_000);
    assert_eq!(parse_str("t", text.as_bytes()).unwrap_err().code, "syntax");
}

fn arbitrary_tree() -> impl Strategy<Value = Tree> {
    let key = "[a-z%/_*-][a-z0-9%/_*-]{0,8}";
    let keys =
        proptest::collection::btree_map(key, proptest::collection::vec(any::<u8>(), 0..12), 0..4);
    let leaf = keys.clone().prop_map(|keys| build(keys, BTreeMap::new()));
    leaf.prop_recursive(4, 24, 3, move |inner| {
        (
            keys.clone(),
            proptest::collection::btree_map(key, inner, 0..3),
        )
            .prop_map(|(keys, sections)| build(keys, sections))
    })
}

fn build(keys: BTreeMap<String, Vec<u8>>, sections: BTreeMap<String, Tree>) -> Tree {
    let mut tree = Tree::new();
    for (name, octets) in keys {
        tree.push(Entry {
            name,
            location: None,
            item: Item::Value(Value::new(octets)),
        });
    }
    for (name, section) in sections {
        tree.push_section(name, section);
    }
    tree
}

#[test]
fn a_name_that_begins_like_a_byte_order_mark_is_read_back() {
    let keys = BTreeMap::from([("\u{feff}name".to_owned(), b"value".to_vec())]);
    let tree = build(keys, BTreeMap::new());

    let parsed = parse_str("t", &tree.to_config()).unwrap();

    assert_eq!(parsed.tree, tree);
}

#[test]
fn names_that_are_the_word_include_are_read_back() {
    let keys = BTreeMap::from([("include".to_owned(), b"value".to_vec())]);
    let sections = BTreeMap::from([("include".to_owned(), Tree::new())]);
    for tree in [
        build(keys, BTreeMap::new()),
        build(BTreeMap::new(), sections),
    ] {
        let parsed = parse_str("t", &tree.to_config()).unwrap();

        assert_eq!(parsed.tree, tree);
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(tree in arbitrary_tree()) {
        let text = tree.to_config();
        let parsed = parse_str("t", &text).unwrap();
        prop_assert_eq!(parsed.tree, tree);
    }

    #[test]
    fn arbitrary_octets_do_not_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_str("t", &text);
    }

    #[test]
    fn arbitrary_grammar_does_not_panic(text in "([a-c]|[ .,:{}=\"#\\\\\n]|include ){0,80}") {
        if let Ok(parsed) = parse_str("t", text.as_bytes()) {
            let again = parse_str("t", &parsed.tree.to_config()).unwrap();
            prop_assert_eq!(again.tree, parsed.tree);
        }
    }
}
