//! Answers for unset options: asked at a terminal, or defaults.

use std::fmt::Display;
use std::io::{self, BufRead, IsTerminal, Stderr, StdinLock, Write};

use crate::error::CliError;
use crate::output::shown;

/// A terminal to ask at, if any.
#[derive(Debug)]
pub(super) struct Answers<R, W> {
    terminal: Option<(R, W)>,
}

/// Answers from the user of the command.
pub(super) type OnTerminal = Answers<StdinLock<'static>, Stderr>;

impl OnTerminal {
    /// Asks at the terminal, if there is one, unless `asks_nothing`.
    pub(super) fn here(asks_nothing: bool) -> Self {
        let asks = !asks_nothing && io::stdin().is_terminal() && io::stderr().is_terminal();
        Self { terminal: asks.then(|| (io::stdin().lock(), io::stderr())) }
    }
}

impl<R: BufRead, W: Write> Answers<R, W> {
    /// Without a terminal, checks that all options without a default are given.
    ///
    /// # Errors
    /// [`CliError::Option`] that names the missing ones.
    pub(super) fn expect(&self, options: &[(&str, bool)]) -> Result<(), CliError> {
        let missing: Vec<&str> =
            options.iter().filter(|(_, is_given)| !is_given).map(|(name, _)| *name).collect();
        match (&self.terminal, missing.is_empty()) {
            (None, false) => Err(not_given(&missing.join(" and "))),
            _ => Ok(()),
        }
    }

    /// The value of an option: the given one, else a valid answer, else the default.
    ///
    /// # Errors
    /// [`CliError`]: there is none of these, or the terminal cannot be read.
    pub(super) fn value<T: Display, E: Display>(
        &mut self,
        option: &str,
        question: &str,
        given: Option<T>,
        default: Option<T>,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<T, CliError> {
        if let Some(given) = given {
            return Ok(given);
        }
        let Some((input, output)) = &mut self.terminal else {
            return default.ok_or_else(|| not_given(option));
        };
        let shown_default = default.as_ref().map_or(String::new(), |default| format!(" [{default}]"));
        let prompt = shown(&format!("{question}{shown_default}: "));
        loop {
            let answer = ask(input, output, &prompt).map_err(terminal_error)?;
            let answer = answer.ok_or_else(|| not_given(option))?;
            if answer.is_empty() {
                match default {
                    Some(default) => return Ok(default),
                    None => continue,
                }
            }
            match parse(&answer) {
                Ok(value) => return Ok(value),
                Err(error) => writeln!(output, "  {}", shown(&error.to_string())).map_err(terminal_error)?,
            }
        }
    }
}

fn not_given(options: &str) -> CliError {
    let what = format!("give {options}: there is no default, and no terminal to ask on");
    CliError::Option { option: "fsdp init", what }
}

/// Asks a question; `None` at the end of input.
fn ask(input: &mut impl BufRead, output: &mut impl Write, prompt: &str) -> io::Result<Option<String>> {
    write!(output, "{prompt}")?;
    output.flush()?;
    let mut line = String::new();
    let read = input.read_line(&mut line)?;
    Ok((read > 0).then(|| line.trim().to_owned()))
}

fn terminal_error(source: io::Error) -> CliError {
    CliError::Read { file: "the answer on the terminal".into(), advice: "", source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask_ranks(lines: &str, default: Option<usize>) -> (Result<usize, CliError>, String) {
        let mut answers = Answers { terminal: Some((lines.as_bytes(), Vec::new())) };
        let value = answers.value("--ranks", "Ranks", None, default, str::parse);
        let (_, printed) = answers.terminal.unwrap();
        (value, String::from_utf8(printed).unwrap())
    }

    #[test]
    fn prompt_repeats_until_answer_parses() {
        let (value, printed) = ask_ranks("many\n\n 3 \n", None);
        assert_eq!(value.unwrap(), 3);
        assert_eq!(printed, "Ranks:   invalid digit found in string\nRanks: Ranks: ");
        let (value, printed) = ask_ranks("x\n\n", Some(8));
        assert_eq!((value.unwrap(), printed.matches("Ranks [8]: ").count()), (8, 2));
    }

    #[test]
    fn missing_answer_error_names_options() {
        let (value, _) = ask_ranks("\n", None);
        let error = value.unwrap_err();
        assert_eq!(error.exit().code(), 2);
        assert!(error.to_string().contains("give --ranks"), "{error}");
        let without_terminal: Answers<&[u8], Vec<u8>> = Answers { terminal: None };
        let error =
            without_terminal.expect(&[("--model", false), ("--data", false), ("--out", true)]).unwrap_err();
        assert!(error.to_string().contains("give --model and --data:"), "{error}");
    }

    #[test]
    fn without_terminal_given_or_default_value_is_used() {
        let mut without_terminal: Answers<&[u8], Vec<u8>> = Answers { terminal: None };
        let mut value =
            |given, default| without_terminal.value("--ranks", "Ranks", given, default, str::parse);
        assert_eq!(value(Some(2), Some(8)).unwrap(), 2);
        assert_eq!(value(None, Some(8)).unwrap(), 8);
        value(None, None::<usize>).unwrap_err();
    }
}
