//! Mode of the protection: enforced, shadowed or off.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

/// Mode of the protection: the library suppresses duplicates, only reports them, or does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Mode {
    /// Duplicates get the recorded result; their bodies do not run.
    #[default]
    Enforce,
    /// The body always runs. The library still reserves, records and compares, and the [`Outcome`](crate::Outcome)
    /// reports the calls whose bodies would not have run under [`Enforce`](Self::Enforce).
    Shadow,
    /// The body runs without a store call.
    Off,
}

/// A [`Mode`] that the program can change while it runs.
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::{Mode, ModeSwitch, Policy};
///
/// static SHIPPING: ModeSwitch = ModeSwitch::new(Mode::Shadow);
/// static POLICY: Policy = Policy::new(Duration::from_secs(7 * 86_400)).mode_switch(&SHIPPING);
///
/// SHIPPING.set(Mode::Enforce); // For example from an admin endpoint.
/// assert_eq!(POLICY.current_mode(), Mode::Enforce);
/// ```
pub struct ModeSwitch(AtomicU8);

impl ModeSwitch {
    pub(super) const MODES: [Mode; 3] = [Mode::Enforce, Mode::Shadow, Mode::Off];

    /// Creates a switch that is set to `mode`.
    pub const fn new(mode: Mode) -> Self {
        Self(AtomicU8::new(mode as u8))
    }

    /// Changes the mode for every call that begins from now on.
    pub fn set(&self, mode: Mode) {
        self.0.store(mode as u8, Ordering::Relaxed);
    }

    /// Returns the current mode.
    pub fn get(&self) -> Mode {
        Self::MODES[usize::from(self.0.load(Ordering::Relaxed))]
    }
}

impl fmt::Debug for ModeSwitch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ModeSwitch").field(&self.get()).finish()
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum ModeSource {
    Fixed(Mode),
    Switch(&'static ModeSwitch),
}
