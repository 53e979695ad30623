//! Runs chat templates, which are not trusted.
//!
//! A template comes with a downloaded model, and is a program. The engine counts its instructions, but a single one can
//! overflow the stack, take all memory, or run for hours, and nothing inside this process can stop it. So a program
//! that has called [`contain_chat_templates`] runs templates in child processes, one for each thread that tokenizes:
//! the same executable, as a [`worker`]. The operating system [limits](limits) what these may take.

mod limits;
mod process;
mod worker;

use std::ffi::OsString;
use std::io;
use std::sync::OnceLock;
use std::vec::IntoIter;

pub(super) use limits::Limits;
pub(super) use process::Process;

use super::fault::{EncodeFault, ScriptFault};
use super::script::Script;
use super::{Chats, Compiled};
use crate::error::DataError;

/// The argument that turns this executable into a worker; it is not a command for people.
const ARGUMENT: &str = "__run-chat-templates";

/// The arguments that turn this executable into a worker, if it is able to.
static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();

/// From this call on, chat templates run in processes of their own: this executable, started with an argument that is
/// meant for nothing else. A program must call this first, and end if the result is not `None`: then it was started as
/// such a process, and has done its work.
///
/// A program that never calls this renders no chat templates: conversations are an error ([`DataError::ChatUncontained`]).
#[must_use = "a process that only runs chat templates must end"]
pub fn contain_chat_templates() -> Option<io::Result<()>> {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == ARGUMENT) {
        let by_hand = "is how a program starts itself to run chat templates, not a command";
        return Some(
            worker::serve().map_err(|fault| io::Error::other(format!("{ARGUMENT} {by_hand}: {fault}"))),
        );
    }
    ARGUMENTS.get_or_init(|| vec![ARGUMENT.into()]);
    None
}

/// Returns the arguments that turn this executable into a worker; `None` if it cannot become one.
pub(super) fn arguments() -> Option<&'static [OsString]> {
    ARGUMENTS.get().map(Vec::as_slice)
}

/// The scripts of conversations, in order, which are made as they are asked for.
pub(crate) struct Scripts<'a> {
    chats: &'a Chats,
    /// The conversations without a script so far, as JSON.
    left: IntoIter<&'a [u8]>,
    place: Place<'a>,
}

/// Where templates run.
enum Place<'a> {
    /// In this process, which a hostile template would end.
    Here(&'a Compiled),
    Apart(Process),
    /// There are no conversations, or the process has failed.
    Nowhere,
}

impl<'a> Scripts<'a> {
    /// Begins with conversations.
    ///
    /// # Errors
    /// If the templates do not compile within the limits, or there is no process for them.
    pub(super) fn of(chats: &'a Chats, conversations: Vec<&'a [u8]>) -> Result<Scripts<'a>, DataError> {
        let place = match chats.worker {
            _ if conversations.is_empty() => Place::Nowhere,
            // Tests compare with this.
            None if cfg!(test) => Place::Here(chats.compiled()?),
            None => return Err(DataError::ChatUncontained),
            Some(arguments) => {
                let idle = chats.idle.lock().expect("no holder panics").pop();
                let process = idle.map_or_else(|| Process::start(arguments, chats.limits, &chats.setup), Ok);
                let asked = process.and_then(|mut process| process.ask(&conversations).map(|()| process));
                Place::Apart(asked.map_err(|fault| match fault {
                    EncodeFault::Data(fault) => fault,
                    fault => chats.template_fault(fault.to_string()),
                })?)
            }
        };
        Ok(Scripts { chats, left: conversations.into_iter(), place })
    }

    /// Returns the script of the next conversation.
    ///
    /// # Errors
    /// [`EncodeFault`].
    pub(crate) fn next(&mut self) -> Result<Script, EncodeFault> {
        let conversation = self.left.next().expect("there is one script for each conversation");
        let script = match &mut self.place {
            Place::Here(compiled) => {
                self.chats.setup.script(compiled, conversation).map_err(EncodeFault::from)
            }
            Place::Apart(process) => process.answer().and_then(|script: Result<_, ScriptFault>| Ok(script?)),
            Place::Nowhere => unreachable!("nothing is asked after the end of a process"),
        };
        if !matches!(script, Ok(_) | Err(EncodeFault::Record(_))) {
            self.place = Place::Nowhere;
        }
        script
    }
}

impl Drop for Scripts<'_> {
    fn drop(&mut self) {
        let place = std::mem::replace(&mut self.place, Place::Nowhere);
        // A process that has not answered everything is ended.
        if let (Place::Apart(process), 0) = (place, self.left.len()) {
            self.chats.idle.lock().expect("no holder panics").push(process);
        }
    }
}

#[cfg(test)]
#[cfg(feature = "tokenizers")]
mod tests;
