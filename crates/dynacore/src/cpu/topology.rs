//! What this process may use of the machine: cores, CPU quota, memory.
//!
//! Everything comes from `/proc` and `/sys`, as text, so that a container's limits are seen as they are. Where a file
//! is missing or does not parse, the answer falls back to what the standard library says and the limit is `None`.

mod cores;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cores::Cores;

/// Cores and memory as the process sees them.
#[derive(Debug, Clone, PartialEq)]
pub struct Topology {
    /// The processor's product name, or the architecture where it does not say.
    pub model_name: String,
    /// Logical CPUs of the machine.
    pub logical_cpus: usize,
    /// Logical CPUs in the process's affinity mask.
    pub allowed_cpus: usize,
    /// Physical cores among the allowed CPUs.
    pub physical_cores: usize,
    /// Those of them that are about as fast as the fastest: all but the efficiency cores of a hybrid processor.
    pub fast_cores: usize,
    /// CPU quota of the control group in cores; `None` without a limit.
    pub quota_cores: Option<f64>,
    /// Physical memory, bytes.
    pub memory_bytes: u64,
    /// Memory the kernel calls available, bytes.
    pub available_bytes: u64,
    /// Memory limit of the control group, bytes; `None` without a limit.
    pub cgroup_limit_bytes: Option<u64>,
    /// What the control group uses of its limit, bytes, without page cache that can be dropped.
    pub cgroup_used_bytes: Option<u64>,
}

impl Topology {
    /// Reads it anew.
    pub fn detect() -> Topology {
        let allowed = allowed_cpus();
        let logical = fs::read_to_string("/sys/devices/system/cpu/online")
            .ok()
            .map_or_else(fallback_cpus, |s| parse_cpu_list(&s).len().max(1));
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let groups = cgroup_dirs();
        let cores = Cores::read(Path::new("/sys"), &allowed).unwrap_or_else(|| {
            let count = fallback_cpus();
            Cores {
                physical: count,
                fast: count,
            }
        });
        let (limit, used) = memory_limit(&groups).map_or((None, None), |(l, u)| (Some(l), u));
        Topology {
            model_name: model_name(),
            logical_cpus: logical,
            allowed_cpus: if allowed.is_empty() {
                logical
            } else {
                allowed.len()
            },
            physical_cores: cores.physical,
            fast_cores: cores.fast,
            quota_cores: cpu_quota(&groups),
            memory_bytes: meminfo_bytes(&meminfo, "MemTotal:").unwrap_or(0),
            available_bytes: meminfo_bytes(&meminfo, "MemAvailable:").unwrap_or(0),
            cgroup_limit_bytes: limit,
            cgroup_used_bytes: used,
        }
    }

    /// Threads `--threads auto` means: fast physical cores within affinity mask and quota, at least 1. A fractional quota
    /// is rounded down: a thread that is throttled half of the time holds up all others at the end of every stage. Why
    /// efficiency cores and hyper-thread siblings do not count: DD-015.
    pub fn auto_threads(&self) -> usize {
        self.fast_cores.min(self.granted_cores()).max(1)
    }

    /// Physical cores within affinity mask and quota, at least 1: more threads than that share cores.
    pub fn granted_cores(&self) -> usize {
        let quota = self
            .quota_cores
            .map_or(usize::MAX, |q| q.floor().max(1.0) as usize);
        self.physical_cores.min(quota).max(1)
    }

    /// Memory this process may use in all, bytes.
    pub fn total_bytes(&self) -> u64 {
        self.cgroup_limit_bytes
            .map_or(self.memory_bytes, |l| l.min(self.memory_bytes))
    }

    /// Memory this process may still take, bytes.
    pub fn free_bytes(&self) -> u64 {
        match (self.cgroup_limit_bytes, self.cgroup_used_bytes) {
            (Some(limit), Some(used)) => self.available_bytes.min(limit.saturating_sub(used)),
            _ => self.available_bytes,
        }
    }
}

/// The most memory of this process, or of another one of this machine, that was ever resident at once, bytes; `None`
/// where the system does not say, as it does on Linux only, or there is no such process.
pub fn peak_resident_bytes(pid: Option<u32>) -> Option<u64> {
    let process = pid.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    meminfo_bytes(&status, "VmHWM:")
}

/// From now on [`peak_resident_bytes`] of this process counts anew, from what is resident now; `false` where the system
/// has no such thing.
pub fn forget_peak_resident() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

fn fallback_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn model_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines()
        .find_map(|l| {
            l.strip_prefix("model name")?
                .split_once(':')
                .map(|(_, v)| v.trim().to_owned())
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// `0-3,8` → {0, 1, 2, 3, 8}. Ranges that make no sense are passed over.
fn parse_cpu_list(text: &str) -> BTreeSet<usize> {
    const MOST: usize = 1 << 16;
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (lo, hi) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(lo), Ok(hi)) = (lo.trim().parse::<usize>(), hi.trim().parse::<usize>()) {
            cpus.extend(lo..=hi.min(MOST));
        }
    }
    cpus
}

fn allowed_cpus() -> BTreeSet<usize> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|l| l.strip_prefix("Cpus_allowed_list:"))
        .map(parse_cpu_list)
        .unwrap_or_default()
}

fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(key))?;
    line.trim()
        .trim_end_matches("kB")
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Control group directories that bind this process, innermost first.
#[derive(Debug, Default)]
struct Cgroups {
    unified: Vec<PathBuf>,
    cpu_v1: Vec<PathBuf>,
    memory_v1: Vec<PathBuf>,
}

fn cgroup_dirs() -> Cgroups {
    parse_cgroups(
        &fs::read_to_string("/proc/self/cgroup").unwrap_or_default(),
        Path::new("/sys/fs/cgroup"),
    )
}

/// Directories from the innermost group up to the mount. Inside a container the path may name a group of the host that
/// is not visible; the mount's own directory is then the container's group.
fn parse_cgroups(text: &str, mount: &Path) -> Cgroups {
    let ancestors = |base: PathBuf, path: &str| -> Vec<PathBuf> {
        let inner = base.join(path.trim_start_matches('/'));
        inner
            .ancestors()
            .take_while(|p| p.starts_with(&base))
            .map(Path::to_owned)
            .collect()
    };
    let mut groups = Cgroups::default();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        if controllers.is_empty() {
            groups.unified = ancestors(mount.to_owned(), path);
        }
        for controller in controllers.split(',') {
            match controller {
                "cpu" => groups.cpu_v1 = ancestors(mount.join("cpu"), path),
                "memory" => groups.memory_v1 = ancestors(mount.join("memory"), path),
                _ => {}
            }
        }
    }
    groups
}

/// `max 100000` or `150000 100000` → cores.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let mut words = text.split_whitespace();
    let quota = words.next()?.parse::<f64>().ok()?;
    let period = words.next()?.parse::<f64>().ok()?;
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The tightest quota on the way up.
fn cpu_quota(groups: &Cgroups) -> Option<f64> {
    let v2 = groups
        .unified
        .iter()
        .filter_map(|d| parse_cpu_max(&fs::read_to_string(d.join("cpu.max")).ok()?));
    let v1 = groups.cpu_v1.iter().filter_map(|d| {
        let quota = fs::read_to_string(d.join("cpu.cfs_quota_us")).ok()?;
        let period = fs::read_to_string(d.join("cpu.cfs_period_us")).ok()?;
        parse_cpu_max(&format!("{} {}", quota.trim(), period.trim()))
    });
    v2.chain(v1).min_by(f64::total_cmp)
}

/// The tightest memory limit on the way up, with what is used of it.
fn memory_limit(groups: &Cgroups) -> Option<(u64, Option<u64>)> {
    // An unlimited v1 group says a number close to 2^63.
    const UNLIMITED: u64 = 1 << 60;
    let used = |dir: &Path, total: &str| {
        let inactive = fs::read_to_string(dir.join("memory.stat")).ok().and_then(|stat| {
            stat.lines().find_map(|l| {
                let (key, value) = l.split_once(' ')?;
                matches!(key, "inactive_file" | "total_inactive_file").then(|| value.parse::<u64>().ok())?
            })
        });
        read_number(&dir.join(total)).map(|n| n.saturating_sub(inactive.unwrap_or(0)))
    };
    let v2 = groups.unified.iter().map(|d| (d, "memory.max", "memory.current"));
    let v1 = groups
        .memory_v1
        .iter()
        .map(|d| (d, "memory.limit_in_bytes", "memory.usage_in_bytes"));
    v2.chain(v1)
        .filter_map(|(dir, limit, usage)| Some((read_number(&dir.join(limit))?, used(dir, usage))))
        .filter(|(limit, _)| *limit < UNLIMITED)
        .min_by_key(|(limit, _)| *limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(cores: usize, quota: Option<f64>) -> Topology {
        Topology {
            model_name: "test".into(),
            logical_cpus: 16,
            allowed_cpus: cores,
            physical_cores: cores,
            fast_cores: cores,
            quota_cores: quota,
            memory_bytes: 8 << 30,
            available_bytes: 6 << 30,
            cgroup_limit_bytes: None,
            cgroup_used_bytes: None,
        }
    }

    #[test]
    fn cpu_lists_parse_and_nonsense_is_passed_over() {
        assert_eq!(
            parse_cpu_list("0-2,7\n").into_iter().collect::<Vec<_>>(),
            [0, 1, 2, 7]
        );
        assert!(parse_cpu_list("").is_empty());
        assert!(parse_cpu_list("x-y,,5-1").is_empty());
        assert_eq!(parse_cpu_list("0-18446744073709551615").len(), (1 << 16) + 1);
    }

    #[test]
    fn auto_threads_stays_within_quota_and_never_is_zero() {
        assert_eq!(topology(8, None).auto_threads(), 8);
        assert_eq!(topology(8, Some(2.5)).auto_threads(), 2);
        assert_eq!(topology(8, Some(0.5)).auto_threads(), 1);
        assert_eq!(topology(1, Some(4.0)).auto_threads(), 1);
        let hybrid = |quota| Topology {
            fast_cores: 6,
            ..topology(14, quota)
        };
        assert_eq!(hybrid(None).auto_threads(), 6);
        assert_eq!(hybrid(Some(4.5)).auto_threads(), 4);
        assert_eq!(
            (hybrid(None).granted_cores(), hybrid(Some(8.0)).granted_cores()),
            (14, 8)
        );
    }

    #[test]
    fn quotas_of_both_versions_parse() {
        assert_eq!(parse_cpu_max("150000 100000"), Some(1.5));
        assert_eq!(parse_cpu_max("max 100000"), None);
        assert_eq!(parse_cpu_max("-1 100000"), None);
        assert_eq!(parse_cpu_max(""), None);
    }

    #[test]
    fn limits_are_read_from_the_whole_way_up() {
        let root = std::env::temp_dir().join(format!("dynacore-cgroup-{}", std::process::id()));
        let inner = root.join("a/b");
        fs::create_dir_all(&inner).expect("a temporary directory can be made");
        fs::write(root.join("a/cpu.max"), "50000 100000\n").expect("write");
        fs::write(inner.join("cpu.max"), "max 100000\n").expect("write");
        fs::write(root.join("a/memory.max"), "1000000\n").expect("write");
        fs::write(root.join("a/memory.current"), "600000\n").expect("write");
        fs::write(root.join("a/memory.stat"), "anon 5\ninactive_file 100000\n").expect("write");
        fs::write(inner.join("memory.max"), "max\n").expect("write");
        let groups = parse_cgroups("0::/a/b\n", &root);
        assert_eq!(cpu_quota(&groups), Some(0.5));
        assert_eq!(memory_limit(&groups), Some((1_000_000, Some(500_000))));
        fs::remove_dir_all(&root).expect("the temporary directory can be removed");
    }

    #[test]
    fn free_memory_respects_the_group() {
        let mut t = topology(2, None);
        assert_eq!(t.free_bytes(), 6 << 30);
        t.cgroup_limit_bytes = Some(2 << 30);
        t.cgroup_used_bytes = Some(3 << 30);
        assert_eq!(t.free_bytes(), 0);
        assert_eq!(t.total_bytes(), 2 << 30);
    }

    #[test]
    fn this_machine_has_a_core() {
        let t = Topology::detect();
        assert!(t.auto_threads() >= 1 && t.auto_threads() <= t.allowed_cpus.max(1));
        assert!((1..=t.physical_cores).contains(&t.fast_cores));
    }
}
