//! The program as people and scripts use it: exit codes, what goes to stdout and what to stderr, refusals and their
//! messages. Every test has a home folder of its own, a tiny made model and no network.

mod benchmark;
mod configuration;
mod generation;
mod models;
mod refusals;
mod serve;
mod support;
