//! A report as a self-contained HTML file: no network, no other files. Drawings are SVG; the script only shows numbers
//! under the pointer.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use super::{Document, Mark};
use crate::atomic_file::is_replaceable;
use crate::error::CliError;

/// The beginning of a report. A file that begins like this may be replaced by another report.
const HEAD: &str = "<!doctype html>\n<!-- Written by fsdp. -->\n";

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("hover.js");

/// A report, written section by section.
#[derive(Debug, Default)]
pub(crate) struct Page {
    body: String,
}

impl Page {
    /// Adds a paragraph of text.
    pub(crate) fn text(&mut self, text: &str) {
        let _ = write!(self.body, "<p>{}</p>", escaped(text));
    }

    /// Adds HTML.
    pub(crate) fn html(&mut self, html: &str) {
        self.body += html;
    }

    /// Adds a drawing.
    pub(crate) fn drawing(&mut self, title: &str, svg: &str) {
        let _ = write!(self.body, "<figure><h3>{}</h3>{svg}</figure>", escaped(title));
    }

    /// Adds a table; marked rows are highlighted.
    pub(crate) fn rows(
        &mut self,
        header: &[impl AsRef<str>],
        rows: impl IntoIterator<Item = (bool, Vec<String>)>,
    ) {
        self.body += "<div class=\"wide\"><table><thead><tr>";
        for name in header {
            let _ = write!(self.body, "<th title=\"{0}\">{0}</th>", escaped(name.as_ref()));
        }
        self.body += "</tr></thead><tbody>";
        for (is_marked, row) in rows {
            self.body += if is_marked { "<tr class=\"marked\">" } else { "<tr>" };
            for cell in row {
                let _ = write!(self.body, "<td>{}</td>", escaped(&cell));
            }
            self.body += "</tr>";
        }
        self.body += "</tbody></table></div>";
    }

    /// Adds a legend of names with their colors and dashes.
    pub(crate) fn legend<'n>(&mut self, items: impl IntoIterator<Item = (&'n str, usize, &'n str)>) {
        self.body += "<ul class=\"legend\">";
        for (name, color, dashes) in items {
            let name = escaped(name);
            let _ = write!(
                self.body,
                "<li title=\"{name}\"><svg viewBox=\"0 0 26 10\"><line class=\"line c{color}\" x1=\"0\" x2=\"26\" \
                 y1=\"5\" y2=\"5\" stroke-dasharray=\"{dashes}\"/></svg>{name}</li>"
            );
        }
        self.body += "</ul>";
    }

    /// Writes the complete file.
    ///
    /// # Errors
    /// [`CliError::Write`].
    pub(crate) fn write(self, title: &str, file: &Path) -> Result<(), CliError> {
        fs::write(file, self.finish(title)).map_err(CliError::write(file))
    }

    /// Returns the complete file.
    pub(crate) fn finish(self, title: &str) -> String {
        let title = escaped(title);
        format!(
            "{HEAD}<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
             script-src 'unsafe-inline'\">\
             <title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>{}\
             <div id=\"tip\" hidden></div><script>{SCRIPT}</script></body></html>\n",
            self.body
        )
    }
}

impl Document for Page {
    fn section(&mut self, title: &str) {
        let mut rest = title.chars();
        let first: String = rest.next().into_iter().flat_map(char::to_uppercase).collect();
        let _ = write!(self.body, "<h2>{}</h2>", escaped(&(first + rest.as_str())));
    }

    fn marked(&mut self, _mark: Mark, begin: &str, rest: &str) {
        self.text(&format!("{begin}{rest}"));
    }

    fn gap(&mut self) {}

    fn pairs(&mut self, _width: usize, rows: &[[String; 2]]) {
        self.rows(&["", ""], rows.iter().map(|row| (false, row.to_vec())));
    }

    fn grid(&mut self, header: Vec<String>, rows: Vec<Vec<String>>) {
        self.rows(&header, rows.into_iter().map(|row| (false, row)));
    }

    fn block(&mut self, text: &str) {
        let _ = write!(self.body, "<pre>{}</pre>", escaped(text));
    }

    fn figure(&mut self, draw: &dyn Fn(&mut Page)) {
        draw(self);
    }
}

/// Checks that a file does not exist or is an earlier report.
///
/// # Errors
/// [`CliError::Option`], [`CliError::Create`].
pub(crate) fn expect_replaceable(option: &'static str, path: &Path) -> Result<(), CliError> {
    match is_replaceable(path, HEAD).map_err(CliError::create(option, path))? {
        true => Ok(()),
        false => {
            let what = format!(
                "{} exists already and is not a report: it would be lost; choose another file",
                path.display()
            );
            Err(CliError::Option { option, what })
        }
    }
}

/// Escapes text for HTML, including attributes. Characters that reverse the direction of text are shown by number.
pub(crate) fn escaped(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => html += "&amp;",
            '<' => html += "&lt;",
            '>' => html += "&gt;",
            '"' => html += "&quot;",
            '\'' => html += "&#39;",
            '\n' => html.push(' '),
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                let _ = write!(html, "\\u{:04x}", u32::from(character));
            }
            character if character.is_control() => {
                let _ = write!(html, "\\u{:04x}", u32::from(character));
            }
            character => html.push(character),
        }
    }
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_in_html() {
        let text = "<script>\"&'\u{202e}\u{7}\n";
        assert_eq!(escaped(text), "&lt;script&gt;&quot;&amp;&#39;\\u202e\\u0007 ");
        let mut page = Page::default();
        page.section("<b>");
        page.text("<b>");
        page.rows(&["<b>"], [(true, vec!["<b>".to_owned()])]);
        let html = page.finish("<b>");
        assert!(html.starts_with(HEAD) && !html.contains("<b>"), "{html}");
    }

    #[test]
    fn page_loads_no_external_resources() {
        let html = Page::default().finish("empty");
        for source in ["http:", "https:", "src=", "href=", "@import", "url("] {
            assert!(!html.contains(source), "{source}");
        }
    }

    #[test]
    fn only_existing_report_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.html");
        expect_replaceable("--output", &path).unwrap();
        fs::write(&path, HEAD).unwrap();
        expect_replaceable("--output", &path).unwrap();
        fs::write(&path, "notes").unwrap();
        let error = expect_replaceable("--output", &path).unwrap_err();
        assert!(error.to_string().contains("it would be lost"), "{error}");
    }
}
