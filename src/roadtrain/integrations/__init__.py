"""One file a framework that takes a placed optimizer with one changed line. Others need none."""
