"""roadtrain"""
