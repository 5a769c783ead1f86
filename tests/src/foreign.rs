// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IKE daemons of other makes as peers: libreswan's pluto and OpenIKED.
//!
//! Both are unpacked beside each other, since the packages of libreswan and strongSwan exclude each
//! other, and run in mount namespaces of their own, since both have paths that are compiled in.
//!
//! ```text
//!  10.1.0.1 (lo)  left  192.0.2.1 ---- u0 ---- 192.0.2.2  right  10.2.0.1 (lo)
//! ```

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::lab::{Lab, Namespace};
use crate::node::{Node, Plane, tail};
use crate::ping::Pings;
use crate::process::{Output, run_command};
use crate::scenario::{definitions, subject};
use crate::{Auth, Suite};

/// Whose daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Make {
    /// libreswan's pluto.
    Libreswan,
    /// OpenIKED, which speaks PF_KEY to the kernel.
    Openiked,
}

impl Make {
    /// Proposals that it and the kernel interface it uses know.
    #[must_use]
    pub fn suite(self) -> Suite {
        match self {
            Self::Libreswan => Suite {
                ike: "aes256gcm16-prfsha256-ecp256",
                esp: "aes128gcm16-ecp256",
            },
            Self::Openiked => Suite {
                ike: "aes256-sha256-ecp256",
                esp: "aes256-sha1-ecp256",
            },
        }
    }

    fn folder(self) -> PathBuf {
        let peers = std::env::var_os("SWANHERD_PEERS")
            .expect("`cargo xtask test --only kernel` unpacks peers and names their folder");
        let folder = PathBuf::from(peers).join(match self {
            Self::Libreswan => "libreswan",
            Self::Openiked => "openiked",
        });
        assert!(folder.is_dir(), "{} is missing", folder.display());
        folder
    }
}

/// Ours at the left, and one of another make at the right.
#[derive(Debug)]
pub struct ForeignPair {
    /// The one under test.
    pub left: Node,
    /// Its peer.
    pub right: Foreign,
    _lab: Lab,
}

/// A daemon of another make, its namespace and its files.
#[derive(Debug)]
pub struct Foreign {
    /// Where it runs.
    pub namespace: Namespace,
    make: Make,
    folder: PathBuf,
    dir: PathBuf,
    child: Option<Child>,
}

impl ForeignPair {
    /// Makes the namespaces and all files, and starts the daemon at the left. Children made by the
    /// peer live for `lifetime` seconds.
    ///
    /// # Panics
    /// When anything of that fails.
    #[must_use]
    pub fn new(make: Make, lifetime: u32) -> Self {
        let mut lab = Lab::new();
        let left = lab.namespace("left");
        let right = lab.namespace("right");
        lab.link(
            (&left, "u0", "192.0.2.1/24"),
            (&right, "u0", "192.0.2.2/24"),
        );
        left.ip("addr add 10.1.0.1/32 dev lo");
        right.ip("addr add 10.2.0.1/32 dev lo");
        let mut left = Node::new(&lab, &left, subject(), Plane::Kernel, "");
        left.configure(&definitions("1", "2", make.suite(), Auth::Psk, "", ""));
        left.start();
        left.load();
        let dir = lab.dir().join(right.name());
        fs::create_dir_all(&dir).expect("a folder for the peer");
        let right = Foreign {
            namespace: right,
            make,
            folder: make.folder(),
            dir,
            child: None,
        };
        match make {
            Make::Libreswan => right.write_libreswan(lifetime),
            Make::Openiked => right.write_openiked(lifetime),
        }
        Self {
            left,
            right,
            _lab: lab,
        }
    }

    /// Asserts that pings pass in both directions.
    ///
    /// # Panics
    /// When one is lost; shows both logs.
    pub fn assert_traffic_passes(&self) {
        let there = self.pings(5);
        let back = Pings::start(&self.right.namespace, "10.2.0.1", "10.1.0.1", 5);
        for report in [there.finish(), back.finish()] {
            assert_eq!(
                (report.sent, report.received),
                (5, 5),
                "{}\n{}",
                report.text,
                self.logs()
            );
        }
    }

    /// Pings from the left inner address to the right one, 20 a second.
    #[must_use]
    pub fn pings(&self, count: u32) -> Pings {
        Pings::start(&self.left.namespace, "10.1.0.1", "10.2.0.1", count)
    }

    /// Both logs, for messages.
    #[must_use]
    pub fn logs(&self) -> String {
        format!(
            "--- left\n{}--- right\n{}",
            self.left.log(),
            self.right.log()
        )
    }
}

impl Foreign {
    /// Starts it as one that waits for its peer.
    ///
    /// # Panics
    /// When it is not ready within 30 s.
    pub fn start(&mut self) {
        match self.make {
            Make::Libreswan => self.spawn(
                "mkdir /run/pluto && mount -t tmpfs libexec /usr/libexec && \
                 mkdir /usr/libexec/ipsec && \
                 mount --bind \"$FOLDER\"/usr/libexec/ipsec /usr/libexec/ipsec && \
                 certutil -N -d sql:\"$DIR\"/nss --empty-password && \
                 export IPSEC_SBINDIR=\"$FOLDER\"/usr/sbin IPSEC_CONF=\"$DIR\"/ipsec.conf \
                 PATH=\"$FOLDER\"/usr/sbin:\"$PATH\" IPSEC_RUNDIR=\"$DIR\"/run && \
                 exec \"$FOLDER\"/usr/libexec/ipsec/pluto --nofork --config \"$DIR\"/ipsec.conf \
                 --rundir \"$DIR\"/run --nssdir \"$DIR\"/nss --secretsfile \"$DIR\"/ipsec.secrets \
                 --ipsecdir \"$DIR\"/ipsec.d --logfile \"$DIR\"/log",
            ),
            Make::Openiked => self.spawn(IKED),
        }
        match self.make {
            Make::Libreswan => self.wait_for_log("loading secrets from", 30),
            // The last that it does with its configuration.
            Make::Openiked => self.wait_for_log("compilation done", 30),
        }
    }

    /// Initiates the child and waits for it. OpenIKED, which initiates at its start only, is
    /// started.
    ///
    /// # Panics
    /// When it is not up within 30 s.
    pub fn initiate(&mut self) {
        match self.make {
            Make::Libreswan => {
                let _ = self.whack(&["--initiate", "--name", "t"]).expect_ok();
            }
            Make::Openiked => {
                let file = self.dir.join("iked.conf");
                let text = fs::read_to_string(&file).expect("written by us");
                fs::write(&file, text.replace(" passive ", " active ")).expect("written before");
                self.spawn(IKED);
                self.wait_for_log(" as initiator ", 30);
            }
        }
    }

    /// Rekeys its child; false when it has no command for that.
    #[must_use]
    pub fn rekey_child(&self) -> bool {
        self.make == Make::Libreswan && {
            let output = self.whack(&["--rekey-ipsec", "--name", "t"]);
            assert!(output.ok(), "{output}\n{}", self.log());
            true
        }
    }

    /// Rekeys its IKE SA; false when it has no command for that.
    #[must_use]
    pub fn rekey_ike(&self) -> bool {
        self.make == Make::Libreswan && {
            let output = self.whack(&["--rekey-ike", "--name", "t"]);
            assert!(output.ok(), "{output}\n{}", self.log());
            true
        }
    }

    /// Deletes its IKE SA.
    ///
    /// # Panics
    /// When its tool fails.
    pub fn terminate(&self) {
        match self.make {
            Make::Libreswan => {
                let output = self.whack(&["--terminate", "--name", "t"]);
                assert!(output.ok(), "{output}\n{}", self.log());
            }
            Make::Openiked => {
                let output = self.ikectl(&["reset", "id", "FQDN/gw1.example.org"]);
                assert!(output.ok(), "{output}\n{}", self.log());
            }
        }
    }

    /// What it has logged and printed.
    #[must_use]
    pub fn log(&self) -> String {
        ["log", "out"]
            .map(|file| tail(&self.dir.join(file)))
            .join("--- printed\n")
    }

    fn whack(&self, args: &[&str]) -> Output {
        let program = self.folder.join("usr/libexec/ipsec/whack");
        let mut command = self.namespace.command(&program.to_string_lossy());
        command.arg("--rundir").arg(self.dir.join("run")).args(args);
        run_command(command, Duration::from_secs(60))
    }

    fn ikectl(&self, args: &[&str]) -> Output {
        let mut command = Command::new(self.folder.join("usr/sbin/ikectl"));
        command.arg("-s").arg(self.dir.join("socket")).args(args);
        run_command(command, Duration::from_secs(60))
    }

    fn wait_for_log(&mut self, text: &str, seconds: u64) {
        self.wait_until(text, seconds, |peer| peer.log().contains(text));
    }

    fn wait_until(&mut self, what: &str, seconds: u64, holds: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            let runs = self
                .child
                .as_mut()
                .is_some_and(|c| matches!(c.try_wait(), Ok(None)));
            assert!(
                runs && begun.elapsed() < Duration::from_secs(seconds),
                "{:?}: not within {seconds} s: {what}\n{}",
                self.make,
                self.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs a script in the namespaces that it replaces by the daemon.
    fn spawn(&mut self, script: &str) {
        let out = File::create(self.dir.join("out")).expect("a file for what the daemon prints");
        let err = out.try_clone().expect("a second handle of it");
        let script = format!("mount -t tmpfs run /run && {script}");
        let child = self
            .namespace
            .command("setpriv")
            .args(["--pdeathsig", "KILL", "sh", "-c", &script])
            .env("FOLDER", &self.folder)
            .env("DIR", &self.dir)
            .env("LC_ALL", "C.UTF-8")
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .expect("the daemon can be started");
        self.child = Some(child);
    }

    fn write_libreswan(&self, lifetime: u32) {
        for folder in ["run", "nss", "ipsec.d"] {
            fs::create_dir_all(self.dir.join(folder)).expect("a folder for the peer");
        }
        write_secret(
            &self.dir.join("ipsec.conf"),
            &format!(
                "config setup
  logfile={}/log
conn t
  ikev2=insist
  authby=secret
  left=192.0.2.2
  leftid=@gw2.example.org
  leftsubnet=10.2.0.0/24
  leftsourceip=10.2.0.1
  right=192.0.2.1
  rightid=@gw1.example.org
  rightsubnet=10.1.0.0/24
  ike=aes_gcm256-sha2_256;dh19
  esp=aes_gcm128;dh19
  salifetime={lifetime}
  auto=add
",
                self.dir.display()
            ),
        );
        write_secret(
            &self.dir.join("ipsec.secrets"),
            "@gw1.example.org @gw2.example.org : PSK \"a secret for the laboratory\"\n",
        );
    }

    fn write_openiked(&self, lifetime: u32) {
        fs::create_dir_all(self.dir.join("etc")).expect("a folder for the peer");
        write_secret(
            &self.dir.join("iked.conf"),
            &format!(
                "ikev2 \"t\" passive esp from 10.2.0.0/24 to 10.1.0.0/24 \
                 local 192.0.2.2 peer 192.0.2.1 \
                 ikesa auth hmac-sha2-256 enc aes-256 prf hmac-sha2-256 group ecp256 \
                 childsa auth hmac-sha1 enc aes-256 group ecp256 \
                 srcid gw2.example.org dstid gw1.example.org lifetime {lifetime} \
                 psk \"a secret for the laboratory\"\n"
            ),
        );
        // It leaves routes to others.
        self.namespace
            .ip("route add 10.1.0.0/24 via 192.0.2.1 src 10.2.0.1");
    }
}

/// OpenIKED with an `/etc` that has its user, and its folder with a key that it insists upon.
const IKED: &str = "mount -t tmpfs etc \"$DIR\"/etc && cd \"$DIR\"/etc && mkdir up work && \
    mkdir -p up/iked/private up/iked/ca up/iked/certs up/iked/crls up/iked/pubkeys && \
    openssl ecparam -genkey -name prime256v1 -noout -out up/iked/private/local.key && \
    cp /etc/passwd /etc/group up && mkdir /run/iked && \
    echo '_iked:x:64999:64999::/run/iked:/usr/sbin/nologin' >>up/passwd && \
    echo '_iked:x:64999:' >>up/group && \
    mount -t overlay etc /etc -o lowerdir=/etc,upperdir=\"$DIR\"/etc/up,workdir=\"$DIR\"/etc/work && \
    ulimit -n 256 && exec \"$FOLDER\"/usr/sbin/iked -d -vv -f \"$DIR\"/iked.conf -s \"$DIR\"/socket";

fn write_secret(path: &Path, text: &str) {
    fs::write(path, text).expect("files of the peer can be written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("and are ours");
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let begun = Instant::now();
        while matches!(child.try_wait(), Ok(None)) {
            if begun.elapsed() > Duration::from_secs(5) {
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
