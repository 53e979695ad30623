//! The documents: every link and anchor in them leads somewhere, the site has every page, and the README is short.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum length of the README: one page.
const README_LINES_MAX: usize = 150;
const README_WORDS_MAX: usize = 2200;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all files with one of these endings in a folder and below, without build outputs.
fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !["target", ".git", "node_modules", "fixtures", "runs"].contains(&name.as_str()) {
            found.extend(files(&path, endings));
        } else if path.is_file() && endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Returns the lines of a Markdown text that are not in a block of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns what the links and pictures of a Markdown text lead to.
fn links(text: &str) -> Vec<String> {
    let text = prose(text).collect::<Vec<_>>().join("\n");
    // Every second part is code.
    let text: String = text.split('`').step_by(2).collect::<Vec<_>>().join("code");
    let targets = text.split("](").skip(1).map(|rest| rest.split([')', ' ']).next().unwrap_or_default());
    targets.map(str::to_owned).collect()
}

/// Returns the anchors of the headings of a Markdown text, as GitHub and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in prose(text).filter(|line| line.starts_with('#')) {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let again = (1..).map(|count| format!("{anchor}-{count}"));
        let free = [anchor.clone()].into_iter().chain(again).find(|anchor| !anchors.contains(anchor));
        anchors.extend(free);
    }
    anchors
}

/// Returns why a link on a page leads nowhere; `None` if it leads somewhere, or out of the repository.
fn broken(page: &Path, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() { page.to_owned() } else { page.parent().unwrap().join(path) };
    if !target.exists() {
        return Some(format!("{}: there is no {link}", page.display()));
    }
    let is_heading = anchor.is_empty() || anchors(&read(&target)).contains(anchor);
    (!is_heading).then(|| format!("{}: there is no heading {link}", page.display()))
}

#[test]
fn links_and_anchors_are_found_in_markdown() {
    let text = "# A `b` c\n[x](y.md#z) `[no](code)`\n```sh\n# no heading\n[no](n.md)\n```\n## A b-c, d\n## A b-c, d\n![p](q.png)\n";
    assert_eq!(links(text), ["y.md#z", "q.png"]);
    assert_eq!(anchors(text), ["a-b-c", "a-b-c-d", "a-b-c-d-1"].map(str::to_owned).into());
}

#[test]
fn links_in_documents_lead_somewhere() {
    let mut seen = 0;
    let mut faults = Vec::new();
    for page in files(&root(), &[".md"]) {
        let links = links(&read(&page));
        seen += links.len();
        faults.extend(links.iter().filter_map(|link| broken(&page, link)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(seen > 200, "{seen} links were found");
}

#[test]
fn pages_named_in_code_exist() {
    let root = root();
    let mut seen = 0;
    let folders = ["crates", "examples", "scripts", "bench", "tests", "tools", ".ci", ".github"]
        .map(|name| root.join(name));
    let endings = [".rs", ".toml", ".py", ".sh", ".yaml", ".yml", ".md", "run"];
    for file in folders.iter().flat_map(|folder| files(folder, &endings)) {
        let text = read(&file);
        for rest in text.split("docs/").skip(1) {
            let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            let name = &rest[..rest.find(|c| !is_of_name(c)).unwrap_or(rest.len())];
            let has_ending = rest[name.len()..].starts_with(".md");
            let exists = root.join(format!("docs/{name}.md")).exists();
            assert!(!has_ending || name.is_empty() || exists, "{} names docs/{name}.md", file.display());
            seen += usize::from(has_ending);
        }
    }
    assert!(seen > 20, "{seen} names were found");
}

#[test]
fn summary_lists_every_page_once_with_its_title() {
    let docs = root().join("docs");
    let summary = read(&docs.join("SUMMARY.md"));
    let listed: Vec<(&str, &str)> = summary
        .lines()
        .filter_map(|line| {
            line.trim_start_matches("- ").strip_prefix('[')?.strip_suffix(')')?.split_once("](")
        })
        .collect();
    let mut names: Vec<String> = listed.iter().map(|(_, path)| (*path).to_owned()).collect();
    names.sort();
    let pages = files(&docs, &[".md"])
        .into_iter()
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned());
    assert_eq!(names, pages.filter(|name| name != "SUMMARY.md").collect::<Vec<_>>());
    for (title, path) in listed {
        let text = read(&docs.join(path));
        assert_eq!(text.lines().next(), Some(format!("# {title}").as_str()), "docs/{path}");
    }
}

#[test]
fn readme_is_one_page() {
    let readme = read(&root().join("README.md"));
    let (lines, words) = (readme.lines().count(), readme.split_whitespace().count());
    assert!(
        lines <= README_LINES_MAX && words <= README_WORDS_MAX,
        "README.md has {lines} lines and {words} words"
    );
}
