package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// TestDirectoriesAreLabelled checks that the directories whose files containers use have
// the label, the file system at the daemon's /dev/shm too. It doesn't run on a host with
// SELinux: it can't show that containers then reach their daemon.
func TestDirectoriesAreLabelled(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: a daemon's /dev/shm is a mount")
	}
	for name, selinux := range map[string]bool{"with SELinux": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			host, at := t.TempDir(), place(t.TempDir())
			if selinux {
				fakeSELinux(t, host)
			}
			if err := clean(host, at); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := at.unmountShm(); err != nil {
					t.Error(err)
				}
			}()
			for _, dir := range []string{at.pipe(), at.clients(), at.shm()} {
				label := make([]byte, 100)
				n, err := unix.Getxattr(dir, "security.selinux", label)
				switch {
				case selinux && (err != nil || string(label[:max(n, 0)]) != containerLabel+"\x00"):
					t.Errorf("%s: label %q, error %v, want %s", dir, label[:max(n, 0)], err, containerLabel)
				case !selinux && string(label[:max(n, 0)]) == containerLabel+"\x00":
					t.Errorf("%s is labelled on a host without SELinux", dir)
				}
			}
		})
	}
}

// fakeSELinux makes a directory look like the root of a host with SELinux.
func fakeSELinux(t *testing.T, host string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(host, "sys/fs/selinux"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(host, "sys/fs/selinux/enforce"), []byte("0"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestLabelForContainers(t *testing.T) {
	const label = "system_u:object_r:container_file_t:s0\x00"
	for name, c := range map[string]struct {
		selinux bool
		answer  error
		want    []string
		err     error
	}{
		"a host without SELinux":          {},
		"a host with SELinux":             {selinux: true, want: []string{"dir security.selinux " + label}},
		"a policy without containers":     {selinux: true, answer: unix.EINVAL, want: []string{"dir security.selinux " + label}},
		"a policy that refuses the label": {selinux: true, answer: unix.EACCES, want: []string{"dir security.selinux " + label}, err: unix.EACCES},
	} {
		t.Run(name, func(t *testing.T) {
			host := t.TempDir()
			if c.selinux {
				fakeSELinux(t, host)
			}
			var got []string
			err := labelForContainers(host, "dir", func(path, attr string, data []byte, _ int) error {
				got = append(got, path+" "+attr+" "+string(data))
				return c.answer
			})
			if !errors.Is(err, c.err) {
				t.Errorf("error %v, want %v", err, c.err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("labels set (-want +got):\n%s", diff)
			}
		})
	}
}
