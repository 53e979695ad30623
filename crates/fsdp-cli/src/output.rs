//! Text for people: reports on stdout, everything else on stderr, colors only on terminals.
//!
//! All text passes through here, where characters that could act on a terminal are escaped: see [`escape`].

mod escape;
mod json_line;
mod paint;
mod process_name;
mod sample;

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use fsdp_data::{Preview, RunData, SourceSummary};

use crate::args::{LogArgs, LogFormat};
use crate::error::CliError;
pub(crate) use escape::{one_line, shown};
pub(crate) use json_line::{now, with_process_name};
pub(crate) use paint::Paint;
pub(crate) use process_name::{process_name, set_process_name};

/// Prints text on stdout. A closed pipe (`| head`) is not an error.
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

/// The style of stderr, set by the command line.
static STYLE: OnceLock<LogArgs> = OnceLock::new();

/// Sets the style of stderr.
pub(crate) fn set_style(style: LogArgs) {
    // Only the first call takes effect.
    let _ = STYLE.set(style);
}

fn style() -> LogArgs {
    STYLE.get().copied().unwrap_or_default()
}

/// Whether progress and notes are suppressed.
pub(crate) fn is_quiet() -> bool {
    style().quiet
}

/// Whether every line on stderr is a JSON object.
pub(crate) fn is_json() -> bool {
    style().log_format == LogFormat::Json
}

/// Whether to draw progress bars on stderr.
pub(crate) fn draws_bars() -> bool {
    io::stderr().is_terminal() && !is_quiet() && !is_json()
}

/// Prints a line on stderr, unless notes are suppressed.
pub(crate) fn note(line: &str) {
    match process_name() {
        None => note_of_any(line),
        Some(_) => tracing::info!("{}", shown(line)),
    }
}

/// Prints a line on stderr, be this the first process or another one, unless notes are suppressed.
pub(crate) fn note_of_any(line: &str) {
    let name = process_name().map_or(String::new(), |name| format!("{name}: "));
    let line = shown(&(name + line));
    match is_json() {
        _ if is_quiet() => {}
        true => write_line(&json_line::line("INFO", &line, &[])),
        false => write_line(&line),
    }
}

/// Prints a warning on stderr.
pub(crate) fn warning(text: &str) {
    match process_name() {
        None if is_json() => write_line(&json_line::line("WARN", &shown(text), &[])),
        None => write_line(&format!("{} {}", Paint::of(&io::stderr()).warning("warning:"), indented(text))),
        Some(_) => tracing::warn!("{}", shown(text)),
    }
}

/// Prints warnings about the data of a job on stderr.
pub(crate) fn data_warnings(data: &RunData) {
    data.warnings().for_each(|(key, text)| warning(&format!("{key}: {text}")));
}

/// Prints a sample of the data on stderr, in the first process.
pub(crate) fn sample(preview: &Preview) {
    let paint = Paint::of(&io::stderr());
    match process_name() {
        // No colors in JSON.
        None if is_quiet() || is_json() => note(&sample::text(preview, Paint { is_on: false })),
        None => write_line(&paint.shown(&sample::text(preview, paint))),
        Some(_) => {}
    }
}

/// Prints, if there are several sources, what a run of `steps` steps takes from each, on stderr.
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

/// Prints errors in the arguments on stderr, or the requested help on stdout.
pub(crate) fn usage(error: &clap::Error) {
    let text = error.to_string();
    // Arguments may be file names expanded by a shell.
    let breaks_lines = std::env::args_os().any(|arg| arg.to_string_lossy().contains('\n'));
    if breaks_lines || shown(&text) != text {
        write_line(&indented(&text));
    } else {
        // A failure to print cannot be reported.
        let _ = error.print();
    }
}

/// Writes an escaped line. A failure to write cannot be reported.
fn write_line(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Indents all lines but the first, so that a line break in a name cannot forge another message.
fn indented(text: &str) -> String {
    shown(text.trim_end()).replace('\n', "\n  ")
}

/// Prints an error and its causes on stderr.
pub(crate) fn error(error: &dyn Error) {
    let (text, causes) = (error.to_string(), causes(error));
    if is_json() {
        let causes: Vec<String> = causes.iter().map(|cause| shown(cause)).collect();
        return write_line(&json_line::line("ERROR", &shown(&text), &causes));
    }
    let paint = Paint::of(&io::stderr());
    let prefix = process_name().map_or(String::new(), |name| format!("{name}: "));
    write_line(&format!("{} {prefix}{}", paint.bad("error:"), indented(&text)));
    causes.iter().for_each(|cause| write_line(&format!("  caused by: {}", indented(cause))));
}

/// The causes of an error, except those already included in the text of the error they caused.
pub(crate) fn causes(error: &dyn Error) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_in_error_cannot_forge_line() {
        assert_eq!(indented("no file a\nerror: none\u{9b}\n"), "no file a\n  error: none\\u009b");
    }
}
