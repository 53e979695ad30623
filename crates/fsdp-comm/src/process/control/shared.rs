//! State shared between the ranks of a process and its control-plane thread.

use std::net::TcpStream;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use fsdp_core::Rank;
use fsdp_core::comm::CommError;
use mio::Waker;

use crate::assembly::TopicStore;
use crate::auth::AuthError;
use crate::flight::FlightRecorder;
use crate::link::Alarm;
use crate::monitor::lock;
use crate::process::protocol::Request;
use crate::process::world::{Failure, Verdict};

type Hook = Box<dyn FnOnce(&Verdict) + Send>;

/// The outcome of a connection's authentication.
pub(super) type Arrival = Result<TcpStream, AuthError>;

/// See the [module](self).
pub(super) struct Shared {
    pub(super) topics: TopicStore,
    state: Mutex<State>,
    left: Condvar,
    waker: Waker,
    recorder: OnceLock<Arc<FlightRecorder>>,
}

#[derive(Default)]
struct State {
    inbox: Inbox,
    verdict: Option<Verdict>,
    /// The first failure of this process.
    failure: Option<CommError>,
    hooks: Vec<Hook>,
    /// Why values can no longer be given or announced.
    lost: Option<CommError>,
    has_left: bool,
}

/// Input for the control-plane thread.
#[derive(Default)]
pub(super) struct Inbox {
    pub(super) requests: Vec<Request>,
    pub(super) arrivals: Vec<Arrival>,
    /// Whether the [`Control`](super::Control) was dropped.
    pub(super) is_abandoned: bool,
}

impl Shared {
    pub(super) fn new(waker: Waker) -> Self {
        let (state, left, recorder) = (Mutex::default(), Condvar::new(), OnceLock::new());
        Self { topics: TopicStore::default(), state, left, waker, recorder }
    }

    /// Sets the recorder whose last call is reported to the others.
    pub(super) fn record(&self, recorder: Arc<FlightRecorder>) {
        // A world has one recorder.
        let _ = self.recorder.set(recorder);
    }

    /// The last collective of a rank, or of any rank of this process.
    pub(super) fn last_call(&self, rank: Option<Rank>) -> Option<String> {
        self.recorder.get()?.last(rank)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn put(&self, put: impl FnOnce(&mut Inbox)) {
        put(&mut self.lock().inbox);
        // If this fails, the thread still looks at the next tick.
        let _woken = self.waker.wake();
    }

    pub(super) fn request(&self, request: Request) {
        self.put(|inbox| inbox.requests.push(request));
    }

    pub(super) fn arrive(&self, arrival: Arrival) {
        self.put(|inbox| inbox.arrivals.push(arrival));
    }

    pub(super) fn abandon(&self) {
        self.put(|inbox| inbox.is_abandoned = true);
    }

    /// Takes everything put since the last call.
    pub(super) fn take(&self) -> Inbox {
        std::mem::take(&mut self.lock().inbox)
    }

    pub(super) fn verdict(&self) -> Option<Verdict> {
        self.lock().verdict.clone()
    }

    pub(super) fn on_verdict(&self, hook: Hook) {
        let mut state = self.lock();
        match state.verdict.clone() {
            None => state.hooks.push(hook),
            Some(verdict) => {
                drop(state);
                hook(&verdict);
            }
        }
    }

    /// Records the verdict and calls the hooks.
    pub(super) fn decide(&self, verdict: &Verdict) {
        let mut state = self.lock();
        state.verdict = Some(verdict.clone());
        let hooks = std::mem::take(&mut state.hooks);
        drop(state);
        hooks.into_iter().for_each(|hook| hook(verdict));
    }

    /// Reports a failure of this process; only the first one counts.
    pub(super) fn fail(&self, error: CommError, failure: Failure) {
        let mut state = self.lock();
        if state.failure.is_none() {
            state.failure = Some(error);
            drop(state);
            self.request(Request::Fail(failure));
        }
    }

    /// Marks ranks from which nothing more comes.
    pub(super) fn lose(&self, ranks: Range<usize>, error: &CommError) {
        if ranks.contains(&0) {
            self.lock().lost.get_or_insert_with(|| error.clone());
        }
        ranks.for_each(|rank| self.topics.lose(Rank(rank), error.clone()));
    }

    /// Fails if rank 0 is lost, so that nothing can be given or announced.
    pub(super) fn check_leader(&self) -> Result<(), CommError> {
        self.lock().lost.clone().map_or(Ok(()), Err)
    }

    /// Records that the thread has ended.
    pub(super) fn leave(&self) {
        self.lock().has_left = true;
        self.left.notify_all();
    }

    pub(super) fn wait_until_left(&self) {
        let state = self.left.wait_while(self.lock(), |state| !state.has_left);
        drop(state.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Alarm for Shared {
    fn raise(&self, error: CommError) {
        let mut failure = Failure::from(&error);
        failure.last_call = self.last_call(failure.rank);
        self.fail(error, failure);
    }

    fn raised(&self) -> Option<CommError> {
        let state = self.lock();
        state.verdict.as_ref().map(Verdict::error).or_else(|| state.failure.clone())
    }
}
