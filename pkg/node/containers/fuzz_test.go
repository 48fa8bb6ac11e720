package containers

import (
	"bytes"
	"testing"
)

// FuzzParseMounts parses mounts that a container with its own mount namespaces can make up.
// Each claim UID that is found must be one that Mark accepts.
func FuzzParseMounts(f *testing.F) {
	f.Add([]byte("40 30 0:5 /marks/a " + MountDir + "/a ro - ext4 /dev/vda rw\n41 30 0:5 /marks/b//deleted " + MountDir + "/b ro - ext4 /dev/vda rw\n"))
	f.Add([]byte("1 2 0:3 /4 " + MountDir + "/../x rw - a b c\n1 2 0:3 /4 " + MountDir + "/ rw - a b c\n1 2 0:3 /4 " + MountDir + "/a/b rw - a b c\n"))
	f.Add([]byte("1 2 0:3 /4 " + MountDir + "/a\\040b rw shared:1 - a  c\n"))
	f.Fuzz(func(t *testing.T, mountinfo []byte) {
		found, err := parseMounts(mountinfo, 1)
		if err != nil && len(found) > 0 {
			t.Errorf("%d mounts and %v", len(found), err)
		}
		for _, m := range found {
			if !uidPattern.MatchString(m.claimUID) {
				t.Errorf("claim %q", m.claimUID)
			}
		}
		if len(found) > bytes.Count(mountinfo, []byte("\n"))+1 {
			t.Errorf("%d mounts", len(found))
		}
	})
}
