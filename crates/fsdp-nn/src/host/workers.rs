//! The threads that a rank computes with.
//!
//! A kernel splits its work by shape into tasks that write disjoint ranges. The result does not depend on which
//! thread runs a task, or on the number of threads.

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use fsdp_core::Error;
use rayon::ThreadPool;
use rayon::prelude::*;

use super::pool::{HostPool, Scratch};

/// Elements per task of an element-wise kernel: few enough for a core's cache, enough to outweigh the cost of handing
/// the task over.
pub(crate) const TASK_ELEMS: usize = 16 * 1024;

/// Minimum number of multiplications of a product that is run on several threads.
const PARALLEL_PRODUCT_MIN: usize = 1 << 18;

/// The operating system refused to start the threads.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} threads: {source}")]
struct NoThreads {
    threads: usize,
    source: rayon::ThreadPoolBuildError,
}

/// A rank's threads, and the scratch memory of their tasks.
#[derive(Debug)]
pub(crate) struct Workers {
    pool: Option<ThreadPool>,
    scratch: Arc<HostPool>,
}

impl Workers {
    /// Starts `threads` threads; with one (or zero), only the calling thread is used.
    pub(crate) fn new(threads: usize, scratch: Arc<HostPool>) -> Result<Self, Error> {
        let build = |threads| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|index| format!("fsdp-kernel-{index}"))
                .build()
                .map_err(|source| Error::Device(Box::new(NoThreads { threads, source })))
        };
        let pool = if threads > 1 { Some(build(threads)?) } else { None };
        Ok(Self { pool, scratch })
    }

    /// Returns workers that use only the calling thread, for work within a task.
    pub(crate) fn inline(&self) -> Self {
        Self { pool: None, scratch: Arc::clone(&self.scratch) }
    }

    /// Runs every task.
    pub(crate) fn each<T: Send>(&self, tasks: impl Iterator<Item = T>, run: impl Fn(T) + Sync) {
        let run: &(dyn Fn(T) + Sync) = &run;
        let Some(pool) = &self.pool else { return tasks.for_each(run) };
        let tasks: Vec<_> = tasks.map(|task| Mutex::new(Some(task))).collect();
        spread(pool, tasks.len(), &|index| {
            let task = tasks[index].lock().unwrap_or_else(PoisonError::into_inner).take();
            run(task.expect("a task is run once"));
        });
    }

    /// Runs every task and returns the results in order.
    pub(crate) fn map<T: Send, R: Send>(
        &self,
        tasks: impl Iterator<Item = T>,
        run: impl Fn(T) -> R + Sync,
    ) -> Vec<R> {
        let tasks: Vec<T> = tasks.collect();
        let mut results: Vec<Option<R>> = tasks.iter().map(|_| None).collect();
        self.each(tasks.into_iter().zip(&mut results), |(task, result)| *result = Some(run(task)));
        results.into_iter().map(|result| result.expect("every task was run")).collect()
    }

    /// Runs a product of `multiplications` multiplications; `run` receives the number of threads to use.
    pub(crate) fn product<R: Send>(&self, multiplications: usize, run: impl FnOnce(usize) -> R + Send) -> R {
        match &self.pool {
            Some(pool) if multiplications >= PARALLEL_PRODUCT_MIN => {
                let (mut run, mut result) = (Some(run), None);
                within(pool, &mut || result = run.take().map(|run| run(pool.current_num_threads())));
                result.expect("what is run within a pool has run")
            }
            _ => run(1),
        }
    }

    /// Returns temporary elements of unspecified contents.
    pub(crate) fn scratch<A: Pod>(&self, len: usize) -> Scratch<A> {
        self.scratch.scratch(len)
    }
}

/// Runs `count` tasks. Not generic, because otherwise rayon's loop is compiled for each kernel: a third of this
/// crate's code.
fn spread(pool: &ThreadPool, count: usize, run: &(dyn Fn(usize) + Sync)) {
    if count < 2 {
        return (0..count).for_each(run);
    }
    within(pool, &mut || (0..count).into_par_iter().with_max_len(1).for_each(run));
}

/// Runs a function on the threads of a pool. Not generic, for the same reason as [`spread`].
fn within(pool: &ThreadPool, run: &mut (dyn FnMut() + Send)) {
    pool.install(run);
}

/// Number of rows of `width` elements per task.
pub(crate) fn task_rows(width: usize) -> usize {
    (TASK_ELEMS / width.max(1)).max(1)
}
