//! What runs in the next step.
//!
//! Pure decisions over counts and token ids: no device, clock, channel, thread or randomness. The engine
//! admits sequences, asks for the next batch, executes it, samples, and commits; see [`Scheduler`].

mod planning;
pub mod scheduler;
pub mod sequence;

pub use scheduler::{
    Admission, Batch, BatchRow, EndReason, Ended, GroupConfig, GroupStats, Outcome, Scheduler,
    SchedulerConfig, Stats,
};
pub use sequence::{NewSequence, SeqId, SeqState, Sequence};
