//! The process in which templates run. Its standard input is a socket, on which it answers until that is closed.
//!
//! Questions and answers are lines of JSON; an empty line ends a batch of questions. The first batch is the [`Limits`] and
//! the [`Setup`], the others are conversations. A batch is read before its first answer is written, so neither side waits
//! for the other to read.

use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;

use serde::Serialize;

use super::limits::{Clock, Limits, text_bytes};
use crate::chat::fault::ScriptFault;
use crate::chat::script::Script;
use crate::chat::setup::Setup;
use crate::panics::catch_panic;

/// Answers until there are no more questions.
///
/// # Errors
/// If standard input is not the socket of a program that needs templates, or fails.
pub(super) fn serve() -> io::Result<()> {
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (mut input, mut output) = (BufReader::new(&stream), BufWriter::new(&stream));
    let Ok([limits, setup]) = <[Vec<u8>; 2]>::try_from(batch(&mut input)?) else { return Ok(()) };
    let (limits, setup): (Limits, Setup) =
        (serde_json::from_slice(&limits)?, serde_json::from_slice(&setup)?);
    let (mut clock, memory_bytes) = Clock::start(limits);
    answer(&mut output, &memory_bytes)?;
    let compiled = setup.templates.compile();
    answer(&mut output, &compiled.as_ref().map(drop))?;
    let Ok(compiled) = compiled else { return Ok(()) };
    clock.end(0, false);
    loop {
        let conversations = batch(&mut input)?;
        if conversations.is_empty() {
            return Ok(());
        }
        for conversation in conversations {
            clock.begin(conversation.len());
            let script = catch_panic(AssertUnwindSafe(|| setup.script(&compiled, &conversation)));
            let script = script.unwrap_or_else(|panic| {
                Err(ScriptFault::Excess(format!("the chat template ends the template engine: {panic}")))
            });
            let script = script.and_then(|script| check(script, text_bytes(conversation.len())));
            clock.end(conversation.len(), script.is_err());
            answer(&mut output, &script)?;
        }
    }
}

/// Checks the length of a text.
fn check(script: Script, most: usize) -> Result<Script, ScriptFault> {
    if script.text.len() <= most {
        return Ok(script);
    }
    let len = script.text.len();
    Err(ScriptFault::Excess(format!(
        "the chat template writes {len} bytes for one conversation, which may have at most {most}"
    )))
}

/// Reads a batch of questions; it is empty if the other side has closed the socket.
fn batch(input: &mut impl BufRead) -> io::Result<Vec<Vec<u8>>> {
    let mut questions = Vec::new();
    loop {
        let mut line = Vec::new();
        input.read_until(b'\n', &mut line)?;
        match line.pop() {
            None => return Ok(Vec::new()),
            Some(_) if line.is_empty() => return Ok(questions),
            Some(_) => questions.push(line),
        }
    }
}

fn answer(output: &mut impl Write, answer: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *output, answer)?;
    output.write_all(b"\n")?;
    output.flush()
}
