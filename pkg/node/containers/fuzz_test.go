package containers

import (
	"strings"
	"testing"
)

// FuzzParseMounts parses mounts that a container with its own mount namespaces can make up.
// Each claim UID that is found must be one that Mark accepts.
func FuzzParseMounts(f *testing.F) {
	f.Add("40 30 0:5 /marks/a " + MountDir + "/a ro - ext4 /dev/vda rw\n41 30 0:5 /marks/b//deleted " + MountDir + "/b ro - ext4 /dev/vda rw\n")
	f.Add("1 2 3 4 " + MountDir + "/../x\n1 2 3 4 " + MountDir + "/\n1 2 3 4 " + MountDir + "/a/b\n")
	f.Fuzz(func(t *testing.T, mountinfo string) {
		found := parseMounts(mountinfo, 1)
		for _, m := range found {
			if !uidPattern.MatchString(m.claimUID) || !strings.Contains(mountinfo, MountDir+"/"+m.claimUID) {
				t.Errorf("claim %q", m.claimUID)
			}
		}
		if len(found) > strings.Count(mountinfo, MountDir) {
			t.Errorf("%d mounts", len(found))
		}
	})
}
