//! Physical cores, and which of them are the fast ones of a hybrid processor.
//!
//! Linux tells kinds of cores apart in three ways, of which the first that is there is taken:
//!
//! 1. Intel's hybrid processors have one set of counters for each kind: `devices/cpu_core/cpus`, `devices/cpu_atom/cpus`
//!    and, where there is a third kind, `devices/cpu_lowpower/cpus` list the logical CPUs of each;
//! 2. `cpu_capacity` of each logical CPU says how much it computes, the fastest being 1024 (Arm, RISC-V, and x86 from
//!    Linux 6.12 on);
//! 3. `cpufreq/cpuinfo_max_freq`: where cores differ in nothing but their clock.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::{parse_cpu_list, read_number};

/// From this share of the fastest core's capacity or clock on, a core is a fast one. Cores of one kind differ by less: the
/// best of a die are clocked some percent higher, and the larger of two kinds of big Arm cores has about a quarter more.
/// Efficiency cores have between a quarter and two thirds.
const FAST_SHARE: f64 = 0.7;

/// Physical cores that a process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cores {
    pub(super) physical: usize,
    /// Those that are about as fast as the fastest.
    pub(super) fast: usize,
}

impl Cores {
    /// Reads what `sys` (`/sys`) says of the logical CPUs `allowed`; `None` if there are none.
    pub(super) fn read(sys: &Path, allowed: &BTreeSet<usize>) -> Option<Cores> {
        let speeds = speeds(sys, allowed);
        let fastest = speeds.values().copied().fold(0.0, f64::max);
        // By the first of the hyper-thread siblings.
        let mut cores: BTreeMap<usize, f64> = BTreeMap::new();
        for cpu in allowed {
            let siblings = sys.join(format!(
                "devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            ));
            let first = fs::read_to_string(siblings)
                .ok()
                .and_then(|list| parse_cpu_list(&list).first().copied());
            // One that says nothing of its speed is not slower than others.
            let speed = speeds.get(cpu).copied().unwrap_or(fastest);
            let core = cores.entry(first.unwrap_or(*cpu)).or_default();
            *core = core.max(speed);
        }
        let from = |fastest: f64| {
            cores
                .values()
                .filter(|speed| **speed >= FAST_SHARE * fastest)
                .count()
        };
        let mut fast = from(fastest);
        // One core alone is for bursts of one program: the kind below does the work of many.
        if fast == 1 {
            let rest = cores
                .values()
                .copied()
                .filter(|speed| *speed < FAST_SHARE * fastest);
            fast = from(rest.fold(0.0, f64::max).min(fastest)).max(fast);
        }
        (!cores.is_empty()).then_some(Cores {
            physical: cores.len(),
            fast,
        })
    }
}

/// How fast each logical CPU is, in units that hold among these CPUs alone; empty if nothing tells them apart.
fn speeds(sys: &Path, cpus: &BTreeSet<usize>) -> BTreeMap<usize, f64> {
    let list = |name: &str| fs::read_to_string(sys.join("devices").join(name).join("cpus")).ok();
    if let (Some(_), Some(slow)) = (list("cpu_core"), list("cpu_atom")) {
        let slow = parse_cpu_list(&slow);
        let slowest = list("cpu_lowpower").map_or_else(BTreeSet::new, |list| parse_cpu_list(&list));
        let speed = |cpu: &usize| match (slow.contains(cpu), slowest.contains(cpu)) {
            (_, true) => 0.4,
            (true, _) => 0.5,
            _ => 1.0,
        };
        return cpus.iter().map(|cpu| (*cpu, speed(cpu))).collect();
    }
    let of = |file: &str| -> BTreeMap<usize, f64> {
        let read = |cpu: &usize| {
            let path = sys.join(format!("devices/system/cpu/cpu{cpu}")).join(file);
            Some((*cpu, read_number(&path)? as f64))
        };
        cpus.iter().filter_map(read).collect()
    };
    let capacities = of("cpu_capacity");
    if capacities.is_empty() {
        of("cpufreq/cpuinfo_max_freq")
    } else {
        capacities
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made `/sys`, removed with the value.
    struct Sys(std::path::PathBuf);

    impl Sys {
        fn new(name: &str) -> Sys {
            let root = std::env::temp_dir().join(format!("dynacore-cores-{name}-{}", std::process::id()));
            fs::create_dir_all(&root).expect("a temporary directory can be made");
            Sys(root)
        }

        fn put(&self, file: &str, text: &str) {
            let path = self.0.join("devices").join(file);
            fs::create_dir_all(path.parent().expect("a file lies in a directory")).expect("directories");
            fs::write(path, format!("{text}\n")).expect("a file can be written");
        }

        /// Cores of two siblings each, numbered next to each other, from `cpus.start` on.
        fn pairs(&self, cpus: std::ops::Range<usize>) {
            for cpu in cpus {
                let first = cpu & !1;
                let file = format!("system/cpu/cpu{cpu}/topology/thread_siblings_list");
                self.put(&file, &format!("{first}-{}", first + 1));
            }
        }

        fn singles(&self, cpus: std::ops::Range<usize>) {
            for cpu in cpus {
                let file = format!("system/cpu/cpu{cpu}/topology/thread_siblings_list");
                self.put(&file, &cpu.to_string());
            }
        }

        fn cores(&self, allowed: &str) -> Option<(usize, usize)> {
            Cores::read(&self.0, &parse_cpu_list(allowed)).map(|c| (c.physical, c.fast))
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("the temporary directory can be removed");
        }
    }

    #[test]
    fn a_plain_machine_counts_siblings_once() {
        let sys = Sys::new("plain");
        sys.pairs(0..8);
        assert_eq!(sys.cores("0-7"), Some((4, 4)));
        assert_eq!(sys.cores("0,2-3,7"), Some((3, 3)));
        assert_eq!(sys.cores(""), None);
        // CPUs that nothing is said of are cores of their own.
        assert_eq!(sys.cores("8-9"), Some((2, 2)));
    }

    #[test]
    fn intel_hybrids_are_told_by_their_counters() {
        let sys = Sys::new("intel");
        sys.pairs(0..12);
        sys.singles(12..20);
        sys.put("cpu_core/cpus", "0-11");
        sys.put("cpu_atom/cpus", "12-19");
        // Turbo clocks that differ among fast cores are not asked for then.
        for cpu in 0..20 {
            let clock = if cpu < 4 { "5800000" } else { "3000000" };
            sys.put(&format!("system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq"), clock);
        }
        assert_eq!(sys.cores("0-19"), Some((14, 6)));
        assert_eq!(sys.cores("0-3,12-13"), Some((4, 2)));
        // Among slow cores alone none is slower than the others.
        assert_eq!(sys.cores("12-19"), Some((8, 8)));
    }

    #[test]
    fn a_processor_of_one_kind_of_core_is_no_hybrid_though_it_names_the_kind() {
        let sys = Sys::new("atom");
        sys.singles(0..4);
        sys.put("cpu_atom/cpus", "0-3");
        assert_eq!(sys.cores("0-3"), Some((4, 4)));
    }

    #[test]
    fn arm_clusters_are_told_by_capacity() {
        let sys = Sys::new("arm");
        sys.singles(0..8);
        for (cpu, capacity) in [250, 250, 250, 250, 780, 780, 780, 1024].into_iter().enumerate() {
            sys.put(
                &format!("system/cpu/cpu{cpu}/cpu_capacity"),
                &capacity.to_string(),
            );
            // Little cores are clocked almost as high: capacity says more.
            sys.put(
                &format!("system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq"),
                "2000000",
            );
        }
        assert_eq!(sys.cores("0-7"), Some((8, 4)));
        // A single fast core does not do the work of four.
        assert_eq!(sys.cores("0-4"), Some((5, 5)));
        assert_eq!(sys.cores("0-3"), Some((4, 4)));
        for (cpu, capacity) in [326, 326, 326, 606, 606, 606, 606, 1024].into_iter().enumerate() {
            sys.put(
                &format!("system/cpu/cpu{cpu}/cpu_capacity"),
                &capacity.to_string(),
            );
        }
        assert_eq!(sys.cores("0-7"), Some((8, 5)));
    }

    #[test]
    fn a_third_kind_of_intel_core_is_the_slowest() {
        let sys = Sys::new("lowpower");
        sys.singles(0..16);
        sys.put("cpu_core/cpus", "0-5");
        sys.put("cpu_atom/cpus", "6-13");
        sys.put("cpu_lowpower/cpus", "14-15");
        assert_eq!(sys.cores("0-15"), Some((16, 6)));
        assert_eq!(sys.cores("6-15"), Some((10, 10)));
    }

    #[test]
    fn clocks_tell_where_nothing_else_does_and_small_differences_are_none() {
        let sys = Sys::new("clocks");
        sys.singles(0..6);
        for (cpu, clock) in [5_700_000, 5_500_000, 5_500_000, 3_300_000, 3_300_000]
            .into_iter()
            .enumerate()
        {
            sys.put(
                &format!("system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq"),
                &clock.to_string(),
            );
        }
        // Of the last core nothing is known.
        assert_eq!(sys.cores("0-5"), Some((6, 4)));
        sys.put("system/cpu/cpu3/cpufreq/cpuinfo_max_freq", "no number");
        assert_eq!(sys.cores("0-5"), Some((6, 5)));
    }
}
