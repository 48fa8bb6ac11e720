package machine

import "testing"

func TestOnlyMountedControllers(t *testing.T) {
	const head = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n"
	for name, tc := range map[string]struct{ text, want string }{
		"version 1": {
			text: head + "cpu\t1\t18\t1\nhugetlb\t0\t18\t1\nmisc\t0\t1\t0\n",
			want: head + "cpu\t1\t18\t1\nhugetlb\t0\t18\t0\nmisc\t0\t1\t0\n",
		},
		"version 2": {
			text: head + "cpu\t0\t18\t1\nhugetlb\t0\t18\t1\n",
			want: head + "cpu\t0\t18\t1\nhugetlb\t0\t18\t1\n",
		},
	} {
		if got := string(onlyMounted([]byte(tc.text))); got != tc.want {
			t.Errorf("%s: got %q, want %q", name, got, tc.want)
		}
	}
}
