package containers

import (
	"strings"
	"testing"
)

// FuzzParseMounts reads mounts as a container can make them up, which has mount
// namespaces of its own. What is taken for a claim is one that Mark takes.
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
