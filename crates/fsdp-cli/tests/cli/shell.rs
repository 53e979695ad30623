//! A shell in its own namespaces; ending it ends every process that it started.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::{Ran, Sandbox};
use crate::world::wait_until;

/// Whether tests may create network namespaces here, which needs root and a container that allows it. Prints a note if
/// not.
pub(crate) fn may_make_namespaces() -> bool {
    let tried = Command::new("unshare").args(["--mount", "--net", "--pid", "--fork", "ip", "link"]).output();
    let may = tried.as_ref().is_ok_and(|tried| tried.status.success());
    if !may {
        println!("skipped: namespaces with networks cannot be made here: {tried:?}");
    }
    may
}

pub(crate) struct Shell<'a> {
    sandbox: &'a Sandbox,
    shell: Child,
}

impl<'a> Shell<'a> {
    /// Starts a command that becomes a shell, with `fsdp` on its `PATH`.
    pub(crate) fn start(sandbox: &'a Sandbox, mut command: Command) -> Self {
        let folder = Path::new(env!("CARGO_BIN_EXE_fsdp")).parent().unwrap().to_owned();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::iter::once(folder).chain(std::env::split_paths(&path));
        command.current_dir(sandbox.path("")).stdin(Stdio::piped());
        command.env("PATH", std::env::join_paths(path).unwrap());
        Self { sandbox, shell: command.spawn().unwrap() }
    }

    /// Starts a command in the background, under a name.
    pub(crate) fn begin(&self, name: &str, command: &str) {
        let (code, part) = (format!("{name}.code"), format!("{name}.part"));
        let _ = std::fs::remove_file(self.sandbox.path(&code));
        let line = format!("({command}; echo $? > {part}; mv {part} {code}) > {name}.out 2> {name}.err &");
        writeln!(self.shell.stdin.as_ref().unwrap(), "{line}").unwrap();
    }

    /// Waits for the end of the command with this name.
    pub(crate) fn end(&self, name: &str) -> Ran {
        wait_until(&format!("the end of {name}"), || self.has_ended(name));
        let read = |what: &str| self.sandbox.read(&format!("{name}.{what}"));
        Ran { code: read("code").trim().parse().ok(), stdout: read("out"), stderr: read("err") }
    }

    pub(crate) fn has_ended(&self, name: &str) -> bool {
        self.sandbox.path(&format!("{name}.code")).exists()
    }

    pub(crate) fn run(&self, name: &str, command: &str) -> Ran {
        self.begin(name, command);
        self.end(name)
    }

    /// Runs a command that must succeed.
    pub(crate) fn succeed(&self, name: &str, command: &str) -> Ran {
        let ran = self.run(name, command);
        assert_eq!(ran.code, Some(0), "{command}: {}", ran.stderr);
        ran
    }

    /// Returns the process ID, outside the namespaces, of the `fsdp` in this sandbox whose environment contains
    /// `variable`.
    pub(crate) fn process_with(&self, variable: &str) -> Option<u32> {
        let is_meant = |process: &u32| {
            let folder = PathBuf::from(format!("/proc/{process}"));
            let is = |name: &str, what: PathBuf| {
                std::fs::read_link(folder.join(name)).is_ok_and(|found| found == what.canonicalize().unwrap())
            };
            let environment = std::fs::read(folder.join("environ")).unwrap_or_default();
            is("exe", env!("CARGO_BIN_EXE_fsdp").into())
                && is("cwd", self.sandbox.path(""))
                && environment.split(|&byte| byte == 0).any(|entry| entry == variable.as_bytes())
        };
        let numbers = std::fs::read_dir("/proc").unwrap();
        numbers.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok()).find(is_meant)
    }
}

impl Drop for Shell<'_> {
    fn drop(&mut self) {
        // This also ends all processes in its namespace.
        let _ = self.shell.kill().and_then(|()| self.shell.wait());
    }
}
