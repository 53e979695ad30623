//! An exponential moving average of the parameters (Polyak and Juditsky 1992 for averages; with decay, Tarvainen and
//! Valpola 2017), computed like `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`.

use super::elementwise::{Elementwise, Number, STATES_MAX};
use super::groups::{GroupSettings, Groups};

/// Averages the parameters that another rule has updated, without changing them. State: `ema`, initially the
/// parameters after step 1, then `ema + (1 - decay) (parameter - ema)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ema {
    /// Weight of the previous average in a step: at least 0 and below 1.
    pub decay: f64,
}

impl Ema {
    /// The name of the state tensor.
    pub const STATE: &'static str = "ema";
}

impl Elementwise for Ema {
    fn state(&self) -> &'static [&'static str] {
        &[Self::STATE]
    }

    fn groups(&self) -> Option<&Groups> {
        None
    }

    /// The weight of the parameters in the average.
    fn factors(&self, _settings: GroupSettings, step: u64, _lr: f64) -> Vec<f64> {
        vec![if step == 1 { 1.0 } else { 1.0 - self.decay }]
    }

    #[inline(always)]
    fn step<N: Number>(&self, factors: &[N], _gradient: N, param: N, state: &mut [N; STATES_MAX]) -> N {
        let (weight, average) = (factors[0], state[0]);
        let away = param - average;
        let from_start = average + weight * away;
        let from_end = param - away * (weight.constant(1.0) - weight);
        state[0] = weight.if_less(weight.constant(0.5), from_start, from_end);
        param
    }
}
