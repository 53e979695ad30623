//! Text for people: the report on stdout, everything else on stderr, colour only where it is read by eye.
//!
//! All of it passes here, where what could act on a terminal is escaped: see [`escape`].

mod escape;
mod sample;

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::sync::{OnceLock, PoisonError, RwLock};

use comfy_table::{CellAlignment, Table, TableComponent, presets};
use fsdp_train::RunData;
use fsdp_train::data::{Preview, SourceSummary};

use crate::args::{LogArgs, LogFormat};
use crate::error::CliError;
use crate::logging;
pub(crate) use escape::{one_line, shown};

/// Prints text on stdout. A reader that has seen enough (`| head`) is no failure.
///
/// # Errors
/// [`CliError::Write`].
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    let text = Paint::of(&stdout).shown(text);
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(CliError::Write { what: "to stdout".to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// How stderr is written, as the command line asks for it.
static STYLE: OnceLock<LogArgs> = OnceLock::new();

/// From now on stderr is written like this.
pub(crate) fn write_as(style: LogArgs) {
    // Only the first call counts.
    let _ = STYLE.set(style);
}

fn style() -> LogArgs {
    STYLE.get().copied().unwrap_or_default()
}

/// Whether neither progress nor notes are wanted.
pub(crate) fn is_quiet() -> bool {
    style().quiet
}

/// Whether every line on stderr is a JSON object.
pub(crate) fn is_json() -> bool {
    style().log_format == LogFormat::Json
}

/// Whether somebody looks at stderr who wants to see bars.
pub(crate) fn draws_bars() -> bool {
    io::stderr().is_terminal() && !is_quiet() && !is_json()
}

/// Who speaks, if it is another process than the first of several.
static SPEAKER: RwLock<Option<String>> = RwLock::new(None);

/// From now on errors and the log say who speaks, and everything else goes to the log: it is said by the first process.
pub(crate) fn speak_as(speaker: String) {
    *SPEAKER.write().unwrap_or_else(PoisonError::into_inner) = Some(speaker);
}

/// Who speaks, if it is not the first process.
pub(crate) fn speaker() -> Option<String> {
    SPEAKER.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Prints a line on stderr, unless nobody wants notes.
pub(crate) fn note(line: &str) {
    match speaker() {
        None if is_quiet() => {}
        None if is_json() => say(&logging::line("INFO", &shown(line), &[])),
        None => say(&shown(line)),
        Some(_) => tracing::info!("{}", shown(line)),
    }
}

/// Prints a warning on stderr.
pub(crate) fn warning(text: &str) {
    match speaker() {
        None if is_json() => say(&logging::line("WARN", &shown(text), &[])),
        None => say(&format!("{} {}", Paint::of(&io::stderr()).warning("warning:"), indented(text))),
        Some(_) => tracing::warn!("{}", shown(text)),
    }
}

/// Prints what the user should know of the data of a job, on stderr.
pub(crate) fn data_warnings(data: &RunData) {
    data.warnings().for_each(|(key, told)| warning(&format!("{key}: {told}")));
}

/// Prints a sample of the data, on stderr, if this is who speaks.
pub(crate) fn sample(preview: &Preview) {
    let paint = Paint::of(&io::stderr());
    match speaker() {
        // Colours are not for those who read JSON.
        None if is_quiet() || is_json() => note(&sample::text(preview, Paint { is_on: false })),
        None => say(&paint.shown(&sample::text(preview, paint))),
        Some(_) => {}
    }
}

/// Prints what a run of `steps` steps takes from each of several sources, on stderr.
pub(crate) fn sources(data: &RunData, steps: u64) {
    let sources = data.sources(steps);
    if sources.len() < 2 {
        return;
    }
    note("sources of data.train: each begins its next epoch when it is exhausted");
    for SourceSummary { paths, share, samples, tokens, epochs } in sources {
        let share = 100.0 * share;
        let paths = paths.join(", ");
        note(&format!(
            "  {share:6.2} %  {samples} samples, {tokens} tokens, {epochs:.2} epochs in {steps} steps: {paths}"
        ));
    }
}

/// Prints what is wrong with the arguments, on stderr, or the help that was asked for, on stdout.
pub(crate) fn usage(told: &clap::Error) {
    let text = told.to_string();
    // Arguments may be names of files too, as a shell finds them.
    let breaks_lines = std::env::args_os().any(|arg| arg.to_string_lossy().contains('\n'));
    if breaks_lines || shown(&text) != text {
        say(&indented(&text));
    } else {
        // Nothing can be done when printing fails.
        let _ = told.print();
    }
}

/// Writes what is fit to be seen. Nothing can be done when that fails.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// A message whose later lines can not be taken for messages of their own: a name in it may have put them there.
fn indented(text: &str) -> String {
    shown(text.trim_end()).replace('\n', "\n  ")
}

/// Prints an error and what caused it on stderr.
pub(crate) fn error(error: &dyn Error) {
    let (text, causes) = (error.to_string(), causes(error));
    if is_json() {
        let causes: Vec<String> = causes.iter().map(|cause| shown(cause)).collect();
        return say(&logging::line("ERROR", &shown(&text), &causes));
    }
    let paint = Paint::of(&io::stderr());
    let speaker = speaker().map_or(String::new(), |speaker| format!("{speaker}: "));
    say(&format!("{} {speaker}{}", paint.bad("error:"), indented(&text)));
    causes.iter().for_each(|cause| say(&format!("  caused by: {}", indented(cause))));
}

/// What caused an error, without what the error that it caused already says.
fn causes(error: &dyn Error) -> Vec<String> {
    let (mut text, mut cause) = (error.to_string(), error.source());
    let mut causes = Vec::new();
    while let Some(source) = cause {
        let next = source.to_string();
        if !text.contains(&next) {
            causes.push(next.clone());
        }
        text = next;
        cause = source.source();
    }
    causes
}

/// The sequences that [`Paint`] writes.
const CODES: [&str; 6] = ["\x1b[2m", "\x1b[32m", "\x1b[1;31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"];

/// Colours, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    is_on: bool,
}

impl Paint {
    /// Colours if `stream` is a terminal and the user has not set `NO_COLOR`.
    pub(crate) fn of(stream: &impl IsTerminal) -> Self {
        let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { is_on: stream.is_terminal() && !is_refused }
    }

    /// Something that is as it should be.
    pub(crate) fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Something that is not.
    pub(crate) fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Something to look at.
    pub(crate) fn warning(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// Something that only surrounds what counts.
    pub(crate) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// A heading.
    pub(crate) fn heading(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.is_on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A text as it may be shown: with these colours, if they are on, and nothing else that acts on a terminal.
    fn shown(self, mut text: &str) -> String {
        let mut out = String::new();
        while let Some(at) = text.find('\x1b').filter(|_| self.is_on) {
            let code = CODES.into_iter().find(|code| text[at..].starts_with(code));
            out += &shown(&text[..at]);
            out += code.unwrap_or("\\u001b");
            text = &text[at + code.map_or(1, str::len)..];
        }
        out + &shown(text)
    }
}

/// A table: words on the left of their columns, numbers on the right.
pub(crate) fn table<const COLUMNS: usize>(
    header: [&str; COLUMNS],
    rows: impl IntoIterator<Item = [String; COLUMNS]>,
) -> String {
    grid(header.map(str::to_owned).into(), rows.into_iter().map(Vec::from))
}

/// A [`table`] of any number of columns.
pub(crate) fn grid(header: Vec<String>, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    let shown = |row: Vec<String>| row.into_iter().map(|cell| one_line(&cell)).collect::<Vec<_>>();
    let (header, rows): (_, Vec<_>) = (shown(header), rows.into_iter().map(shown).collect());
    let begins_with_digit = |cell: &String| {
        cell.trim_start_matches(['+', '-', '~', '$']).starts_with(|first: char| first.is_ascii_digit())
    };
    let has_numbers = |column: usize| rows.iter().filter_map(|row| row.get(column)).any(begins_with_digit);
    table.load_preset(presets::NOTHING).set_header(header).add_rows(rows.clone());
    table
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─');
    for (_, column) in table.column_iter_mut().enumerate().skip(1).filter(|&(column, _)| has_numbers(column))
    {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_numbers_right_and_words_left() {
        let rows = [["a", "+7", "x"], ["b", "1234", "long"]].map(|row| row.map(str::to_owned));
        insta::assert_snapshot!(table(["name", "bytes", "kind"], rows), @r"
         name   bytes   kind
        ─────────────────────
         a         +7   x
         b       1234   long
        ");
    }

    #[test]
    fn paint_is_plain_when_off() {
        assert_eq!(Paint { is_on: false }.bad("x"), "x");
        assert_eq!(Paint { is_on: true }.bad("x"), "\x1b[1;31mx\x1b[0m");
    }

    #[test]
    fn colours_are_shown_and_no_other_sequence_is() {
        let paint = Paint { is_on: true };
        let painted = [paint.good("a"), paint.bad("b"), paint.warning("c"), paint.heading("d")]
            .join("\x1b[2J\x1b]0;x\x07");
        let expected = painted.replace("\x1b[2J\x1b]0;x\x07", r"\u001b[2J\u001b]0;x\u0007");
        assert_eq!(paint.shown(&painted), expected);
        assert_eq!(Paint { is_on: false }.shown("\x1b[32ma"), r"\u001b[32ma");
    }

    #[test]
    fn a_name_in_an_error_can_not_forge_a_line() {
        assert_eq!(indented("no file a\nerror: none\u{9b}\n"), "no file a\n  error: none\\u009b");
    }

    #[test]
    fn cells_of_tables_are_one_line() {
        let text = table(["name"], [["a\nb\u{202e}".into()]]);
        assert!(text.ends_with("a\\nb\\u202e\n"), "{text}");
    }
}
