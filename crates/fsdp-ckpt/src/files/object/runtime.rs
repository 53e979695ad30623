//! The threads that drive requests to stores.

use std::{future::Future, io, sync::OnceLock, thread};

use tokio::runtime::{Builder, Runtime};

/// Number of threads; they only copy bytes and wait.
const THREADS: usize = 2;

/// The runtime that all stores of this process share.
static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// Starts the runtime, once.
///
/// # Errors
/// The system has no more threads. The runtime would panic, so as many threads are tried first.
pub(super) fn start() -> io::Result<()> {
    if RUNTIME.get().is_some() {
        return Ok(());
    }
    let mut threads = Vec::new();
    let tried = (0..THREADS).try_for_each(|_| {
        let thread = thread::Builder::new().spawn(thread::park)?;
        threads.push(thread);
        io::Result::Ok(())
    });
    for thread in threads {
        thread.thread().unpark();
        thread.join().expect("a parked thread does not panic");
    }
    tried.map_err(|error| io::Error::new(error.kind(), format!("cannot start a thread: {error}")))?;
    runtime();
    Ok(())
}

/// The runtime, started if it is not yet running.
pub(super) fn runtime() -> &'static Runtime {
    RUNTIME.get_or_init(|| {
        let built = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("object store")
            .enable_all()
            .build();
        built.expect("the system has room for two more threads")
    })
}

/// Blocks until a future of a store completes.
pub(super) fn wait<F: Future>(answer: F) -> F::Output {
    runtime().block_on(answer)
}
